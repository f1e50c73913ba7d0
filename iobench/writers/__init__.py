"""Writers: each one moves file images to and from storage by one I/O path.

The names below are the writers, and what an author of another one needs; docs/writers.md shows how
to use them. Each is imported when it is used, so that `import iobench.writers` loads nothing else.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from iobench.errors import UnavailableError, transfer_errors

if TYPE_CHECKING:
    from iobench.writers.aiofiles import AiofilesWriter
    from iobench.writers.base import (
        Availability,
        LocalSource,
        RangeSource,
        Source,
        StoredObjects,
        Writer,
    )
    from iobench.writers.blocks.workers import BlockPool, Blocks, run_workers
    from iobench.writers.buffered import BufferedWriter
    from iobench.writers.device.staging import staged
    from iobench.writers.gds import GdsWriter
    from iobench.writers.hybrid import HybridWriter
    from iobench.writers.image import Bytes, FileImage, Segment
    from iobench.writers.local.new_file import NewFile, try_directory
    from iobench.writers.local.posix import PosixWriter, pread_all, pwrite_all
    from iobench.writers.null import NullWriter
    from iobench.writers.odirect import ODirectWriter
    from iobench.writers.options import WriterOptions, option
    from iobench.writers.s3 import S3Writer
    from iobench.writers.stream import BlockStream, PlainSink, Sink
    from iobench.writers.transfer import Fallback, Meter, PathCount, Transfer
    from iobench.writers.uncached import UncachedWriter
    from iobench.writers.uring import UringWriter

# Workers share blocks by iterators, lists and dictionaries whose single steps are atomic only under
# the GIL. Without it two workers may get one block, and the file has wrong bytes.
if not getattr(sys, "_is_gil_enabled", lambda: True)():
    raise UnavailableError(
        "iobench", "this Python runs without the GIL.", "Start it with -X gil=1 or PYTHON_GIL=1."
    )

__all__ = [
    "AiofilesWriter",
    "Availability",
    "BlockPool",
    "BlockStream",
    "Blocks",
    "BufferedWriter",
    "Bytes",
    "Fallback",
    "FileImage",
    "GdsWriter",
    "HybridWriter",
    "LocalSource",
    "Meter",
    "NewFile",
    "NullWriter",
    "ODirectWriter",
    "PathCount",
    "PlainSink",
    "PosixWriter",
    "RangeSource",
    "S3Writer",
    "Segment",
    "Sink",
    "Source",
    "StoredObjects",
    "Transfer",
    "UncachedWriter",
    "UringWriter",
    "Writer",
    "WriterOptions",
    "option",
    "pread_all",
    "pwrite_all",
    "run_workers",
    "staged",
    "transfer_errors",
    "try_directory",
]

_MODULES = {
    "null": ("NullWriter",),
    "s3": ("S3Writer",),
    "aiofiles": ("AiofilesWriter",),
    "gds": ("GdsWriter",),
    "hybrid": ("HybridWriter",),
    "uring": ("UringWriter",),
    "odirect": ("ODirectWriter",),
    "uncached": ("UncachedWriter",),
    "buffered": ("BufferedWriter",),
    "base": (*("Availability", "LocalSource", "RangeSource", "Source", "StoredObjects", "Writer"),),
    "blocks.workers": ("BlockPool", "Blocks", "run_workers"),
    "device.staging": ("staged",),
    "image": ("Bytes", "FileImage", "Segment"),
    "local.new_file": ("NewFile", "try_directory"),
    "local.posix": ("PosixWriter", "pread_all", "pwrite_all"),
    "options": ("WriterOptions", "option"),
    "stream": ("BlockStream", "PlainSink", "Sink"),
    "transfer": ("Fallback", "Meter", "PathCount", "Transfer"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    # Submodules must raise AttributeError here: `from iobench.writers import registry` then
    # imports the module.
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
