"""A new file takes over the space of an old one: which ones may, and what becomes of the bytes."""

from __future__ import annotations

import fcntl
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE
from types import BuiltinFunctionType, ModuleType
from typing import Any, Self

import numpy as np
import pytest

from iobench.units import KIB, MIB
from iobench.writers.image import Bytes, FileImage
from iobench.writers.local import new_file
from iobench.writers.local.new_file import NewFile, reusing
from iobench.writers.registry import make
from iobench.writers.transfer import Meter

from ...conftest import MakeFilesystem

_OLD = 2 * MIB + 77


@pytest.fixture(params=["ext4", "tmpfs"])
def directory(request: pytest.FixtureRequest, shared_filesystems: MakeFilesystem) -> Iterator[Path]:
    """An empty directory on a local file system."""
    root = shared_filesystems("ext4") if request.param == "ext4" else Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=root) as made:
        yield Path(made)


@pytest.fixture
def spare(directory: Path) -> Path:
    """A directory with a file `model` of old bytes."""
    made = directory / "spare"
    made.mkdir()
    (made / "model").write_bytes(b"\xaa" * _OLD)
    return made


def _data(size_bytes: int) -> Bytes:
    return np.random.default_rng(size_bytes).integers(0, 256, size_bytes, dtype=np.uint8)


def _write(directory: Path, spare: Path, data: Bytes, writer: str = "hybrid") -> int:
    """Write `model` over that of `spare`; return the inode that it has."""
    with reusing(directory, spare, "model"):
        done = make(writer).write(FileImage.of("model", [data]), directory)
    assert done.durable
    assert (directory / "model").read_bytes() == data.tobytes()
    return (directory / "model").stat().st_ino


@pytest.mark.parametrize(
    "writer", ["buffered", "uncached", "hybrid", "odirect", "uring", "aiofiles"]
)
@pytest.mark.parametrize("size", [0, 100, 4 * KIB + 1, 3 * MIB + 5])
def test_the_new_file_has_its_own_bytes_in_the_old_space(
    directory: Path, spare: Path, writer: str, size: int
) -> None:
    """No byte of the old file stays, whether the new one is larger or smaller."""
    if not make(writer).available(directory).ok:
        pytest.skip(f"{writer} is not available here")
    old = (spare / "model").stat().st_ino
    assert _write(directory, spare, _data(size), writer) == old
    assert os.listdir(spare) == []
    assert sorted(os.listdir(directory)) == ["model", "spare"]


def _opened(file: Path) -> Callable[[], object]:
    fd = os.open(file, os.O_RDONLY)
    return lambda: os.close(fd)


def _mapped(file: Path) -> Callable[[], object]:
    with file.open("rb") as opened:
        mapped = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
    return mapped.close


def _linked(file: Path) -> Callable[[], object]:
    os.link(file, file.with_name("kept"))
    return lambda: None


def _permitted(file: Path) -> Callable[[], object]:
    file.chmod(0o600)
    return lambda: None


def _described(file: Path) -> Callable[[], object]:
    os.setxattr(file, "user.iobench", b"1")
    return lambda: None


def _is_link(file: Path) -> Callable[[], object]:
    file.rename(file.with_name("kept"))
    file.symlink_to("kept")
    return lambda: None


def _missing(file: Path) -> Callable[[], object]:
    file.rename(file.with_name("kept"))
    return lambda: None


@pytest.mark.parametrize(
    "used", [_opened, _mapped, _linked, _permitted, _described, _is_link, _missing]
)
def test_a_file_that_is_still_used_keeps_its_bytes(
    directory: Path, spare: Path, used: Callable[[Path], Callable[[], object]]
) -> None:
    """The new file has space of its own then, and is written all the same."""
    inode = (spare / "model").stat().st_ino
    release = used(spare / "model")
    try:
        assert _write(directory, spare, _data(MIB)) != inode
        assert {file.read_bytes() for file in spare.iterdir()} == {b"\xaa" * _OLD}
    finally:
        release()


_READER = """
import sys
path, opened = sys.argv[1], None
for line in sys.stdin:
    if line == "open\\n":
        try:
            opened = open(path, "rb", buffering=0)
            answer = "opened"
        except FileNotFoundError:
            answer = "missing"
    else:
        answer = "no file" if opened is None else f"{set(opened.read())}"
    print(answer, flush=True)
"""


class _Reader:
    """Another process that opens the old checkpoint at one moment of the save, and reads later."""

    def __init__(self, path: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _READER, path], stdin=PIPE, stdout=PIPE, text=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def ask(self, what: str) -> str:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()


def test_a_file_that_is_opened_while_it_is_taken(
    directory: Path, spare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, between and after each system call, the reader finds the old bytes or no file."""
    passed: list[str] = []
    moment = 0

    def meeting(name: str, call: Callable) -> Callable:
        def called(*args: Any, **how: Any) -> Any:
            if len(passed) == moment:
                opened.append(reader.ask("open"))
            passed.append(name)
            return call(*args, **how)

        return called

    class Meeting:
        """A module, in whose functions the reader comes first."""

        def __init__(self, module: ModuleType) -> None:
            self._module = module

        def __getattr__(self, name: str) -> Any:
            found = getattr(self._module, name)
            return meeting(name, found) if isinstance(found, BuiltinFunctionType) else found

    monkeypatch.setattr(new_file, "os", Meeting(os))
    monkeypatch.setattr(new_file, "fcntl", Meeting(fcntl))
    before = (spare / "model").read_bytes()
    outcomes, moments = set(), 1
    while moment < moments:
        (spare / "model").write_bytes(before)
        passed.clear()
        opened: list[str] = []
        with _Reader(spare / "model") as reader:
            _write(directory, spare, _data(MIB))
            if not opened:  # after the last of them
                opened.append(reader.ask("open"))
            outcomes.add((opened[0], reader.ask("read")))
        (directory / "model").unlink()
        moment, moments = moment + 1, len(passed) + 1
    assert "fcntl" in passed
    assert moments > 8
    assert outcomes == {("opened", "{170}"), ("missing", "no file")}


def test_a_failed_write_leaves_nothing(directory: Path, spare: Path) -> None:
    with reusing(directory, spare, "model"), NewFile(directory / "model", 0, Meter()) as file:
        os.pwrite(file.fd, b"half", 0)
    assert os.listdir(directory) == ["spare"]
    assert _write(directory, spare, _data(MIB))  # without a spare


def test_only_the_file_of_that_name_and_only_inside_the_block(directory: Path, spare: Path) -> None:
    inode = (spare / "model").stat().st_ino
    writer, image = make("buffered"), FileImage.of("model", [_data(100)])
    with reusing(directory, spare, "model"):
        writer.write(FileImage.of("other", [_data(100)]), directory)
    writer.write(image, directory)
    with reusing(directory, None, "model"):
        writer.write(image, directory)
    assert (spare / "model").stat().st_ino == inode
    assert (spare / "model").stat().st_size == _OLD
