"""Evict files from the page cache, and count the pages that stay."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from iobench import linux
from iobench.bench.judging.verdict import RESIDENT_LIMIT
from iobench.results.records import Cold
from iobench.writers.removal import entries_below

_DROP_CACHES = "/proc/sys/vm/drop_caches"


@contextmanager
def opened(path: str | Path, flags: int = 0) -> Iterator[int]:
    """Yield a descriptor of a file or directory, to read from; `flags` are further ones."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        yield fd
    finally:
        os.close(fd)


@dataclass(frozen=True)
class FilesBelow:
    """The paths of all regular files below a directory; each iteration lists them again."""

    directory: str | os.PathLike[str]

    def __iter__(self) -> Iterator[str]:
        return filter(os.path.isfile, entries_below(self.directory))


@dataclass(frozen=True, kw_only=True)
class EvictedFiles:
    """Files of `size_bytes` after their eviction: the bytes that stayed in the page cache."""

    method: str
    resident_bytes: int = 0
    size_bytes: int = 0
    dropped_caches: bool = False

    @staticmethod
    def cold(parts: Sequence[EvictedFiles]) -> Cold:
        """Return what stayed of all `parts`, each on its own machine."""
        size = sum(one.size_bytes for one in parts)
        resident = sum(one.resident_bytes for one in parts)
        return Cold(
            resident_bytes=resident,
            resident_fraction=resident / size if size else 0.0,
            method="+".join(sorted({one.method for one in parts if one.method})),
            dropped_caches=any(one.dropped_caches for one in parts),
        )


def make_cold(files: Iterable[str | Path]) -> Cold:
    """Sync and evict `files` as `evict` does, and return what stayed in the page cache."""
    return EvictedFiles.cold([evict(files)])


def evict(files: Iterable[str | Path], *, beside: bool = False) -> EvictedFiles:
    """Sync and evict `files`, then count their bytes that are still in the page cache.

    `files` is iterated several times, and only an iterator is kept as a list.

    POSIX_FADV_DONTNEED comes first. It is only advice: the kernel keeps pages that are dirty,
    locked or mapped. When more than 1% stay and the process may do so, the whole page cache is
    dropped. The caller decides what the remaining pages mean. With `beside`, a save is being timed:
    the files must be durable already. They are not synced, which would flush the device's cache,
    and no other pages are dropped.
    """
    paths = list(files) if isinstance(files, Iterator) else files
    size = sum(evict_file(path, sync=not beside) for path in paths)
    resident, method = resident_bytes(paths)
    dropped = False
    left = resident > RESIDENT_LIMIT * size
    if left and not beside and os.access(_DROP_CACHES, os.W_OK):
        dropped = _drop_caches()
        resident, method = resident_bytes(paths)
    return EvictedFiles(
        resident_bytes=resident, size_bytes=size, method=method, dropped_caches=dropped
    )


def evict_file(path: str | Path, *, sync: bool = True) -> int:
    """Evict one file, and sync it before; return its bytes."""
    with opened(path) as fd:
        if sync:
            os.fsync(fd)  # posix_fadvise does not evict dirty pages
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return os.fstat(fd).st_size


def resident_bytes(paths: Iterable[str | Path]) -> tuple[int, str]:
    """Return the bytes of files in the page cache, and the methods that counted them."""
    total, methods = 0, set()
    for path in paths:
        with opened(path) as fd:
            resident, method = linux.resident_bytes(fd)
        total += resident
        methods.add(method)
    return total, "+".join(sorted(methods))


def _drop_caches() -> bool:
    try:
        with open(_DROP_CACHES, "w") as control:
            control.write("1")  # only the page cache: 2 would drop dentries and inodes
    except OSError:  # the mode permits it, but the kernel refuses, for example in containers
        return False
    return True
