"""O_DIRECT tried on one file: is it taken, at which alignment, and does it really avoid the cache?

A file system may open a file with O_DIRECT and still go through the page cache (tmpfs; ext4 with
data=journal), so what stays cached afterwards is counted.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path

from iobench.linux import dio_alignment, resident_bytes
from iobench.units import KIB, format_size

_BLOCK = 64 * KIB
_TORCH_ALIGNMENT = 64  # of tensor memory on the CPU
_REMEDY = "The writer odirect is not available here; buffered and uncached are."


def try_direct(path: Path) -> tuple[bool, str, str]:
    """(works, what was found, what to do). Creates the file `path`; the caller removes it.

    Raises OSError only for what has nothing to do with O_DIRECT, a full disk for one.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return False, f"open refused: {errno.errorcode[error.errno]}", _REMEDY
    memory = mmap.mmap(-1, 4 * _BLOCK)
    try:
        return _try(descriptor, memory)
    finally:
        os.close(descriptor)
        memory.close()


def _try(descriptor: int, memory: mmap.mmap) -> tuple[bool, str, str]:
    told = dio_alignment(descriptor)
    if told is not None and not told.offset:
        return False, "statx: this file admits no direct I/O", _REMEDY
    memory[:_BLOCK] = data = os.urandom(_BLOCK)
    if not _taken(lambda view: os.pwritev(descriptor, [view], 0), memory, 0, _BLOCK):
        return False, "open accepted, an aligned write refused", _REMEDY
    read = _taken(lambda view: os.preadv(descriptor, [view], 0), memory, _BLOCK, _BLOCK)
    if not read or memory[_BLOCK : 2 * _BLOCK] != data:
        return False, "what was read is not what was written", _REMEDY
    cached, _ = resident_bytes(descriptor)
    if cached:
        kept = (
            f"accepted, yet {format_size(cached)} of {format_size(_BLOCK)} went to the page cache"
        )
        return False, kept, "Direct I/O is only an appearance here; use buffered or uncached."
    if told is None:
        what = "works; alignment not told by statx"
    else:
        what = f"works; memory aligned to {told.memory} B, offsets to {told.offset} B"
    return True, f"{what}; {_unaligned(descriptor, memory)}", ""


def _unaligned(descriptor: int, memory: mmap.mmap) -> str:
    """What happens to memory aligned like a torch tensor, and to shorter blocks, beyond 64 KiB."""

    def write(view: memoryview) -> int:
        return os.pwritev(descriptor, [view], _BLOCK)

    tensor = _taken(write, memory, _TORCH_ALIGNMENT, _BLOCK)
    smallest = next((n for n in (1, 512, 4096, _BLOCK) if _taken(write, memory, 0, n)), _BLOCK)
    said = "taken" if tensor else "refused"
    return f"tried: {_TORCH_ALIGNMENT} B aligned memory {said}, smallest block {smallest} B"


def _taken(call: Callable[[memoryview], int], memory: mmap.mmap, start: int, length: int) -> bool:
    """Whether the kernel takes that part of `memory`; EINVAL is its word for bad alignment."""
    with memoryview(memory) as whole, whole[start : start + length] as view:
        try:
            return call(view) == length
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
