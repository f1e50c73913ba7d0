"""A disk that is full at the first, a middle or the last block."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from iobench import linux
from iobench.errors import TransferError
from iobench.testing import content
from iobench.units import KIB, MIB
from iobench.writers.base import Writer
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
def test_disk_full(
    make: Callable[..., Writer], names, disk: Path, fallocate: bool, at: str, how: str
) -> None:
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
    assert _free(disk) >= before - 64 * KIB  # what was taken is given back
    (disk / "filler").unlink()
    save()
    assert (disk / "model").read_bytes() == data.tobytes()
    assert names(disk) == {"model"}
