"""Eviction of files from the page cache, and its proof."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from iobench import linux
from iobench.bench.judging.verdict import RESIDENT_LIMIT
from iobench.bench.targets.cold import make_cold
from iobench.environment import probe_directory
from iobench.units import KIB

SIZE = 256 * KIB


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file in the page cache, on a file system that can evict it."""
    if not next(probe.ok for probe in probe_directory(tmp_path) if probe.name == "eviction"):
        pytest.skip("the file system of the tests evicts nothing (tmpfs)")
    path = tmp_path / "file"
    path.write_bytes(os.urandom(SIZE))
    return path


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold all pages of `path` in memory by mlock."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    with path.open("r+b") as opened, mmap.mmap(opened.fileno(), SIZE) as mapping:
        memory = ctypes.c_char.from_buffer(mapping)
        try:
            if libc.mlock(ctypes.addressof(memory), SIZE):
                pytest.skip(f"mlock is refused: {os.strerror(ctypes.get_errno())}")
            yield
        finally:
            del memory


def test_what_was_written_is_evicted_and_counted(file: Path) -> None:
    """A dirty file is synced and evicted, and the count proves it."""
    with file.open("rb") as opened:
        assert linux.resident_bytes(opened.fileno())[0] == SIZE
    cold = make_cold([file])
    assert (cold.resident_bytes, cold.resident_fraction, cold.dropped_caches) == (0, 0.0, False)
    assert cold.method in ("cachestat", "mincore")


def test_a_file_held_in_memory_is_not_cold(file: Path) -> None:
    """Pages that mlock keeps are counted, also among files that could be evicted."""
    other = file.with_name("other")
    other.write_bytes(os.urandom(3 * SIZE))
    with locked(file):
        cold = make_cold([file, other])
    assert cold.resident_bytes == SIZE
    assert cold.resident_fraction == 0.25 > RESIDENT_LIMIT
    assert not cold.dropped_caches


def test_the_whole_cache_is_dropped_only_where_it_is_permitted(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If drop_caches is writable, it is used, and the remaining pages are counted again."""
    control = tmp_path / "drop_caches"
    control.touch()
    monkeypatch.setattr("iobench.bench.targets.cold._DROP_CACHES", str(control))
    make_cold([file])
    assert control.read_text() == ""  # there was no need
    with locked(file):
        cold = make_cold([file])
    assert control.read_text() == "1"
    assert (cold.dropped_caches, cold.resident_bytes) == (True, SIZE)


def test_a_refused_drop_is_reported(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drop_caches that looks writable and refuses counts as not dropped."""
    monkeypatch.setattr("iobench.bench.targets.cold._DROP_CACHES", "/dev/full")
    with locked(file):
        assert not make_cold([file]).dropped_caches
