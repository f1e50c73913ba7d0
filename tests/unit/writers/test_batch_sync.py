"""write_many: syncs the files of a batch together; a file is visible only after its sync."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from support.every_bytecode import SOON_S, Place, Tracer, at_every_place
from support.one_by_one import OneByOne

from iobench.errors import TransferError
from iobench.testing import Footprint, content
from iobench.writers.image import FileImage
from iobench.writers.local import posix
from iobench.writers.local.new_file import PART_SUFFIX, NewFile
from iobench.writers.registry import make

_FILES = 40


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posix, "TOGETHER", 8)


def _images() -> list[FileImage]:
    return [FileImage.of(f"{number:02}", [content(100 + number)]) for number in range(_FILES)]


def test_each_file_is_synced_before_it_is_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file is synced once, by several threads, and renamed after that."""
    synced, renamed, threads = [], [], set()
    fsync, replace = os.fsync, os.replace

    def recorded(fd: int) -> None:
        fsync(fd)
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        threads.add(threading.current_thread())

    def checked(source: str, target: str) -> None:
        assert source in synced
        renamed.append(target)
        replace(source, target)

    writer = make("buffered")
    monkeypatch.setattr(os, "fsync", recorded)
    monkeypatch.setattr(os, "replace", checked)
    moved = writer.write_many(_images(), tmp_path)
    assert renamed == [str(tmp_path / image.path) for image in _images()]
    files = [name for name in synced if name != str(tmp_path)]
    assert len(files) == len(set(files)) == _FILES
    assert synced[-1] == str(tmp_path)
    assert len(threads) > 1
    assert moved.phases_s["sync"] <= moved.elapsed_s


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("name", ["buffered", "aiofiles", "one by one"])
def test_no_more_images_are_kept_than_are_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, durable: bool
) -> None:
    """A generator makes each image when it is due; files that are published keep no memory."""
    kept: list[weakref.ref[object]] = []
    most = 0

    def alive() -> int:
        return sum(one() is not None for one in kept)

    init = NewFile.__init__

    def counted(file: NewFile, *given: Any) -> None:
        kept.append(weakref.ref(file))
        init(file, *given)

    def made() -> Iterator[FileImage]:
        nonlocal most
        for number in range(_FILES):
            most = max(most, alive())
            image = FileImage.of(f"{number:02}", [content(100)])
            kept.append(weakref.ref(image))
            yield image

    monkeypatch.setattr(NewFile, "__init__", counted)
    writer = OneByOne() if name == "one by one" else make(name)
    moved = writer.write_many(made(), tmp_path, durable=durable)
    assert (moved.files, moved.bytes, len(os.listdir(tmp_path))) == (_FILES, 100 * _FILES, _FILES)
    assert 0 < most <= 4 * 8  # images and files of a batch, and those that are made now
    assert alive() == 0


@pytest.mark.parametrize("nth", [0, 20, _FILES - 1])
def test_a_failing_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    """Earlier batches are published whole; the failed batch and later ones leave no file."""
    fsync, calls, lock = os.fsync, iter(range(1000)), threading.Lock()
    reader, other = os.pipe()  # fsync of a pipe is EINVAL

    def broken(fd: int) -> int:
        with lock:
            return reader if next(calls) == nth else fd

    writer, images = make("buffered"), _images()
    with Footprint.unchanged(), monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: fsync(broken(fd)))
        with pytest.raises(TransferError) as caught:
            writer.write_many(images, tmp_path)
    assert caught.value.errno == errno.EINVAL
    names = sorted(os.listdir(tmp_path))
    assert names == [image.path for image in images][: len(names)]
    assert len(names) == nth // 8 * 8
    for image in images[: len(names)]:
        assert (tmp_path / image.path).read_bytes() == image.segments[0].memory.tobytes()
    writer.write_many(images, tmp_path)
    assert len(os.listdir(tmp_path)) == _FILES
    os.close(reader)
    os.close(other)


def _interrupted(where: str, place: Place | None) -> Tracer:
    """Write some files, with Boom at `place` in the caller or in the thread that syncs."""
    tracer = Tracer([posix.__file__], place)
    images = _images()[:20]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
        directory = Path(made)
        writer = make("buffered")
        tracer.run(lambda: writer.write_many(images, directory), in_threads=where == "worker")
        until = time.monotonic() + SOON_S
        while any(one.name == "iobench-worker" for one in threading.enumerate()):
            assert time.monotonic() < until, "the thread that syncs goes on for ever"
            time.sleep(0.001)
        whole = {image.path: image.segments[0].memory.tobytes() for image in images}
        for file in directory.iterdir():
            if not file.name.endswith(PART_SUFFIX):
                assert file.read_bytes() == whole[file.name]
        writer.write_many(images, directory)
        assert {*os.listdir(directory)} >= {*whole}
    return tracer


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # a file of an interrupted NewFile
@pytest.mark.parametrize("where", ["caller", "worker"])
def test_an_exception_at_every_bytecode(where: str) -> None:
    """Ctrl-C anywhere in write_many: no thread stays, which would keep the process from its end."""
    at_every_place(lambda place: _interrupted(where, place), least=20 if where == "caller" else 8)


def test_a_failing_write_of_a_later_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batches before it are published; what was written of its own is removed."""
    pwritev, calls = os.pwritev, iter(range(1000))

    def failing(*arguments: object) -> int:
        if next(calls) == 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwritev(*arguments)

    with Footprint.unchanged(), monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", failing)
        with pytest.raises(TransferError, match="No space left"):
            make("hybrid").write_many(_images(), tmp_path)
    assert sorted(os.listdir(tmp_path)) == [f"{number:02}" for number in range(16)]


def test_ctrl_c_while_files_are_synced(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    impatience: Callable[[threading.Event], AbstractContextManager[None]],
) -> None:
    """It is raised once no thread uses the files any more, and no file is left."""
    go_on, ended = threading.Event(), []

    def slow(_: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert go_on.wait(10)
            ended.append(True)

    monkeypatch.setattr(os, "fsync", slow)
    with Footprint.unchanged(), impatience(go_on):
        make("buffered").write_many(_images()[:8], tmp_path)
    assert ended
    assert not list(tmp_path.iterdir())
