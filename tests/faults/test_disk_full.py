"""A disk that is full at the first, a middle or the last block, or in a background save."""

import contextlib
import errno
import os
from pathlib import Path

import pytest
import torch
from support.tiers import until

from iobench import Checkpointer, KeepLast, linux
from iobench.errors import TransferError, UnavailableError
from iobench.testing import content
from iobench.units import KIB, MIB
from iobench.writers.image import FileImage

pytestmark = pytest.mark.root

_SIZE = 4 * MIB
_LEFT = {"first": 0, "middle": _SIZE // 2, "last": _SIZE - 32 * KIB}
_OLD = b"the last good one"


@pytest.fixture
def disk(new_filesystem) -> Path:
    """A small ext4 with an earlier checkpoint on it."""
    root = new_filesystem("ext4", 32 * MIB)
    (root / "model").write_bytes(_OLD)
    return root


def _leave(root: Path, left_bytes: int) -> None:
    """Fill the disk until `left_bytes` are free."""
    os.sync()
    with (root / "filler").open("wb", buffering=0) as filler:
        linux.fallocate(filler.fileno(), 0, _free(root) - max(left_bytes, 64 * KIB))
        filler.seek(0, os.SEEK_END)
        with contextlib.suppress(OSError):  # until there is no more
            while not left_bytes and filler.write(bytes(1024)):
                pass


def _free(root: Path) -> int:
    found = os.statvfs(root)
    return found.f_bavail * found.f_frsize


@pytest.mark.parametrize("fallocate", [True, False])
@pytest.mark.parametrize("at", _LEFT)
@pytest.mark.parametrize("how", ["write", "stream"])
def test_disk_full(make, names, disk, fallocate, at, how) -> None:
    """The caller gets ENOSPC, only the earlier file stays, and with free space it works again."""
    writer, data = make(disk, fallocate=fallocate), content(_SIZE)

    def save() -> None:
        if how == "write":
            writer.write(FileImage.of("model", [data]), disk)
            return
        with writer.open(disk / "model") as stream:
            for start in range(0, _SIZE, 100_000):
                stream.write(data[start : start + 100_000])

    _leave(disk, _LEFT[at])
    before = _free(disk)
    with pytest.raises(TransferError) as caught:
        save()
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(disk / "model")
    assert (disk / "model").read_bytes() == _OLD
    assert names(disk) == {"model", "filler"}
    # What was taken is given back, by the last one that holds the file: maybe the kernel's flusher.
    until(lambda: _free(disk) >= before - 64 * KIB)
    (disk / "filler").unlink()
    save()
    assert (disk / "model").read_bytes() == data.tobytes()
    assert names(disk) == {"model"}


@pytest.mark.parametrize("budget", [None, "2MiB"])
def test_a_background_save(make, new_filesystem, budget: str | None) -> None:
    """The trainer goes on and gets the error at the next call. The last checkpoint stays."""
    root: Path = new_filesystem("ext4", 48 * MIB)
    state = {"w": torch.zeros(2 * MIB), "step": 0}
    keep = KeepLast(1)
    with Checkpointer(root / "run", writer=make(root), keep=keep, budget=budget) as ckpt:
        ckpt.save_async(state, 1)
        ckpt.wait()
        (root / "filler").write_bytes(bytes(26 * MIB))
        state["w"].fill_(2)
        save = ckpt.save_async(state, 2)
        state["w"].fill_(3)  # trains on
        with pytest.raises(TransferError) as caught:
            ckpt.wait()
        assert caught.value.errno == errno.ENOSPC
        assert save.status == "failed"
        assert {path.name for path in (root / "run").iterdir()} == {"step-1", ".iobench-lock"}
        assert not ckpt.load()["w"].any()
        (root / "filler").unlink()
        ckpt.save_async(state, 3)
        ckpt.wait()
        assert ckpt.steps() == [3]
        assert (ckpt.load()["w"] == 3).all()


def test_opened_on_a_full_disk(make, new_filesystem) -> None:
    """It loads if the writer can be tried without free space; otherwise the error asks for space.
    No lock stays."""
    root: Path = new_filesystem("ext4", 32 * MIB)
    writer = make(root)
    with Checkpointer(root / "run", writer=writer) as ckpt:
        ckpt.save({"step": 1}, 1)
    with (root / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while filler.write(bytes(4096)):
            pass
    if writer.available(root).ok:
        with Checkpointer(root / "run", writer=writer) as ckpt:
            assert ckpt.load() == {"step": 1}
            with pytest.raises(TransferError, match="No space left"):
                ckpt.save({"w": torch.zeros(MIB)}, 2)
    else:
        with pytest.raises(UnavailableError, match=r"No space left on device\)\. Make room there"):
            Checkpointer(root / "run", writer=writer)
    (root / "filler").unlink()
    with Checkpointer(root / "run", writer=writer) as ckpt:
        assert ckpt.load() == {"step": 1}
        ckpt.save({"step": 2}, 2)
