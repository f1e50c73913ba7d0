"""Storage that becomes read-only, disappears or fails."""

import errno
import itertools
import os
import shutil
import subprocess
import warnings

import numpy as np
import pytest
from support.filesystems import shut_down

from iobench.errors import TransferError, UnavailableError
from iobench.testing import content, expect_raises
from iobench.units import MIB
from iobench.writers.image import FileImage
from iobench.writers.local.new_file import NewFile

_DATA = content(MIB + 77)


@pytest.mark.root
def test_read_only(make, names, new_filesystem) -> None:
    """After a remount as read-only, `available` says no, writes fail and reads work; and back
    again."""
    root = new_filesystem("ext4", 32 * MIB)
    writer = make(root)
    writer.write(FileImage.of("model", [_DATA]), root)
    subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
    answer = writer.available(root)
    assert not answer.ok
    assert "Read-only file system" in answer.reason
    expect_raises(UnavailableError, writer.require, root)
    for save in (
        lambda: writer.write(FileImage.of("model", [_DATA]), root),
        lambda: writer.write(FileImage.of("new/model", [_DATA]), root),
        lambda: writer.open(root / "model"),
    ):
        assert expect_raises(TransferError, save).errno == errno.EROFS
    back = np.zeros_like(_DATA)
    writer.read(FileImage.of("model", [back]), root)
    assert np.array_equal(back, _DATA)
    assert names(root) == {"model"}
    subprocess.run(["mount", "-o", "remount,rw", str(root)], check=True)
    writer.write(FileImage.of("new/model", [_DATA]), root)


@pytest.mark.parametrize("moment", ["before a write", "before close"])
def test_directory_removed(make, tmp_path, moment: str) -> None:
    """The directory is removed while a stream writes into it: ENOENT at close, and no new
    directory."""
    writer = make(tmp_path)
    (tmp_path / "step").mkdir()
    stream = writer.open(tmp_path / "step" / "model")
    if moment == "before a write":
        shutil.rmtree(tmp_path / "step")
    stream.write(_DATA)
    if moment == "before close":
        shutil.rmtree(tmp_path / "step")
    error = expect_raises(TransferError, stream.close)
    assert error.errno == errno.ENOENT
    assert stream.closed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.root
@pytest.mark.parametrize("how", ["write", "stream", "abort"])
def test_dead_device(make, new_filesystem, monkeypatch, how) -> None:
    """A file system that has shut down: the caller gets the error, with a note about the remaining
    file."""
    root = new_filesystem("ext4", 32 * MIB)
    writer = make(root)
    writer.write(FileImage.of("model", [_DATA]), root)

    if how == "write":
        real = os.fsync
        monkeypatch.setattr(os, "fsync", lambda fd: (shut_down(root), real(fd)))
        error = expect_raises(
            TransferError, writer.write, FileImage.of("model", [_DATA]), root, durable=True
        )
    else:
        stream = writer.open(root / "model")
        stream.write(_DATA)
        shut_down(root)
        if how == "abort":
            with pytest.warns(ResourceWarning, match="left behind"):
                stream.abort()
            assert stream.closed
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            error = expect_raises(TransferError, stream.close)
        assert stream.closed
    assert error.errno in (errno.EIO, errno.EROFS)
    assert error.filename == str(root / "model")


@pytest.mark.root
@pytest.mark.parametrize("at", [1, 127])
def test_dead_device_under_many(make, new_filesystem, monkeypatch, at) -> None:
    """Of many files, synced while others are written, the error names the one that failed."""
    root = new_filesystem("ext4", 32 * MIB)
    writer = make(root)
    made, real = itertools.count(), NewFile.set_size

    def set_size(file: NewFile, size_bytes: int) -> None:
        real(file, size_bytes)
        if next(made) == at:
            shut_down(root)

    monkeypatch.setattr(NewFile, "set_size", set_size)
    images = [FileImage.of(f"{number}", [_DATA[:5000]]) for number in range(128)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # of what cannot be removed any more
        error = expect_raises(TransferError, writer.write_many, images, root)
    assert error.errno in (errno.EIO, errno.EROFS)
    assert error.filename in {str(root / image.path) for image in images}
