"""write_many: files are synced while the next ones are written, and none is visible before."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from iobench.errors import TransferError
from iobench.testing import Footprint, content
from iobench.writers import posix
from iobench.writers.image import FileImage
from iobench.writers.registry import make

_FILES = 40


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posix, "_TOGETHER", 8)


def _images() -> list[FileImage]:
    return [FileImage.of(f"{number:02}", [content(100 + number)]) for number in range(_FILES)]


@pytest.mark.parametrize("name", ["hybrid", "buffered"])
def test_each_file_is_synced_before_it_is_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Every file is synced once, by other threads, and renamed only after that."""
    synced, renamed, threads = set(), [], set()
    fsync, replace = os.fsync, os.replace

    def recorded(fd: int) -> None:
        fsync(fd)
        synced.add(os.readlink(f"/proc/self/fd/{fd}"))
        threads.add(threading.current_thread())

    def checked(source: str, target: str) -> None:
        assert source in synced
        renamed.append(target)
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recorded)
    monkeypatch.setattr(os, "replace", checked)
    moved = make(name).write_many(_images(), tmp_path)
    assert renamed == [str(tmp_path / image.path) for image in _images()]
    assert len(synced) == _FILES + 1  # the directory
    assert len(threads) > 1
    assert moved.phases_s["sync"] <= moved.elapsed_s


@pytest.mark.parametrize("nth", [0, 20, _FILES - 1])
def test_a_failing_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    """What was published before is whole; the failed batch and later ones leave nothing."""
    fsync, calls, lock = os.fsync, iter(range(1000)), threading.Lock()

    def failing(fd: int) -> None:
        with lock:
            number = next(calls)
        if number == nth:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(fd)

    writer, images = make("hybrid"), _images()
    with Footprint.unchanged(), monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        with pytest.raises(TransferError) as caught:
            writer.write_many(images, tmp_path)
    assert caught.value.errno == errno.EIO
    names = sorted(os.listdir(tmp_path))
    assert names == [image.path for image in images][: len(names)]
    assert len(names) == nth // 8 * 8
    for image in images[: len(names)]:
        assert (tmp_path / image.path).read_bytes() == image.segments[0].memory.tobytes()


def test_a_failing_write_while_others_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files in the background are waited for before they are removed."""
    pwritev, calls = os.pwritev, iter(range(1000))

    def failing(*arguments: object) -> int:
        if next(calls) == 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwritev(*arguments)

    with Footprint.unchanged(), monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", failing)
        with pytest.raises(TransferError, match="No space left"):
            make("hybrid").write_many(_images(), tmp_path)
    assert sorted(os.listdir(tmp_path)) == [f"{number:02}" for number in range(8)]
