"""Probe of O_DIRECT on one file: is it accepted, at which alignment, and does it avoid the cache?

A file system may accept O_DIRECT and still use the page cache (tmpfs; ext4 with data=journal), so
the pages that are cached afterwards are counted.
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
    """Return (works, findings, remedy). Creates the file `path`; the caller removes it.

    Raises OSError only for errors unrelated to O_DIRECT, such as a full disk.
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
    reported = dio_alignment(descriptor)
    if reported is not None and not reported.offset:
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
        return False, kept, "O_DIRECT has no effect here; use buffered or uncached."
    if reported is None:
        what = "works; statx reports no alignment"
    else:
        what = f"works; memory aligned to {reported.memory} B, offsets to {reported.offset} B"
    return True, f"{what}; {_unaligned(descriptor, memory)}", ""


def _unaligned(descriptor: int, memory: mmap.mmap) -> str:
    """Try memory aligned like a torch tensor's, and shorter blocks, at offset 64 KiB."""

    def write(view: memoryview) -> int:
        return os.pwritev(descriptor, [view], _BLOCK)

    tensor = _taken(write, memory, _TORCH_ALIGNMENT, _BLOCK)
    smallest = next((n for n in (1, 512, 4096, _BLOCK) if _taken(write, memory, 0, n)), _BLOCK)
    answer = "accepted" if tensor else "refused"
    return f"tried: {_TORCH_ALIGNMENT} B aligned memory {answer}, smallest block {smallest} B"


def _taken(call: Callable[[memoryview], int], memory: mmap.mmap, start: int, length: int) -> bool:
    """Whether the kernel accepts this part of `memory`; EINVAL means bad alignment."""
    with memoryview(memory) as whole, whole[start : start + length] as view:
        try:
            return call(view) == length
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
