"""The file of `torch.save(state, path)` as an image: stock byte for byte, its storages not copied.

Stock torch writes the file itself, but for the storages: with `torch.serialization.skip_data` it
leaves room for them. The room is filled with the storages' own memory, and the CRC32s over
them, which torch then cannot know, are put in. So the zip's layout is torch's in every version, and
the checksums cost little: they are computed while the file is written (docs/decisions/0034).

What torch cannot write so has no image, and its callers let torch write it otherwise: the format
before torch 1.6, quantized and nested tensors and others without storages of their own, and every
file of a torch that is not known.
"""

from __future__ import annotations

import functools
import os
import pickle
import tempfile
import types
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from iobench.formats.torch_layout import TorchLayout
from iobench.formats.torch_settings import crc32_setting
from iobench.writers.image import FileImage

__all__ = ["image", "layout"]

_STREAM = "archive"  # what torch calls the archive of a stream, and of a path beyond ASCII


def image(
    path: str, state: Any, target: str | Path = "", *, crc: bool = True, **options: Any
) -> FileImage | None:
    """The image of the file of `torch.save(state, target/path, **options)`; None: see above.

    The image's memory is the storages' own: they must stay as they are while it is written.
    `crc=False` leaves out the zip's CRC32, as torch.serialization.set_crc32_options(False) does.
    `options` are torch.save's. What pickling raises is passed on. Storages on a CUDA device are
    copied to the host piece by piece for their CRC32. None also for a state with storages anywhere
    else.
    """
    found = layout(path, state, target, crc=crc, **options)
    if found is None or not found.devices <= {"cpu", "cuda"}:
        return None
    return found.image(found.memories())


def layout(
    path: str, state: Any, target: str | Path = "", *, crc: bool = True, **options: Any
) -> TorchLayout | None:
    """What of that file is torch's own and where each storage goes, wherever they are now.

    Everything but the storages' bytes is taken here. None: see above.
    """
    if not options.get("_use_new_zipfile_serialization", True) or not _is_like_stock():
        return None
    whole = os.path.join(target, path)
    name = os.path.basename(path) if whole.isascii() else _STREAM
    try:
        return _layout(path, name, state, crc, options)
    except RuntimeError as error:
        if "skip_data" in str(error):  # torch's refusal of what has no storages
            return None
        raise


def _layout(path: str, name: str, state: Any, crc: bool, options: Mapping[str, Any]) -> TorchLayout:
    """The layout of the file `path` that torch would write under the `name`, an ASCII one."""
    with tempfile.TemporaryDirectory(prefix="iobench-torch-") as directory:
        skeleton = os.path.join(directory, name)
        with _ascii(directory) as there:
            storages = _save_skeleton(state, os.path.join(there, name), crc, options)
        with open(skeleton, "rb") as file:
            return TorchLayout.read(path, file, storages, crc=crc)


@contextmanager
def _ascii(directory: str) -> Iterator[str]:
    """A path of `directory` in ASCII: torch takes no name of a file from any other."""
    if directory.isascii():
        yield directory
        return
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def _save_skeleton(
    state: Any, path: str, crc: bool, options: Mapping[str, Any]
) -> dict[str, torch.UntypedStorage]:
    """Write all but the storages to `path`; the storages by their keys in the file."""
    storages: dict[str, torch.UntypedStorage] = {}
    stock: Any = options.get("pickle_module", pickle)

    class Recorder(stock.Pickler):  # type: ignore[misc]
        """torch derives its pickler from this, and tells by persistent_id what a storage is."""

        def __init_subclass__(cls) -> None:
            original = cls.persistent_id

            def persistent_id(self: Any, value: Any) -> Any:
                found = original(self, value)
                if found is not None:
                    typed = isinstance(value, torch.storage.TypedStorage)
                    storages[found[2]] = value._untyped_storage if typed else value
                return found

            cls.persistent_id = persistent_id

    module = types.SimpleNamespace(Pickler=Recorder, __name__=stock.__name__)
    with torch.serialization.skip_data(), crc32_setting(crc):
        torch.save(state, path, **{**options, "pickle_module": module})
    return storages


@functools.cache
def _is_like_stock() -> bool:
    """Whether a small state comes out as this torch saves it, byte for byte."""
    host = torch.device("cpu")  # whatever the default is
    some, none = torch.arange(9, device=host), torch.zeros(0, device=host)
    state = {"a": torch.arange(5.0, device=host), "b": [some[2:4], none], "c": 1}
    with tempfile.TemporaryDirectory(prefix="iobench-torch-") as directory:
        file = os.path.join(directory, "state.pt")
        for crc in (True, False):
            with crc32_setting(crc), _ascii(directory) as there:
                torch.save(state, os.path.join(there, "state.pt"))
            try:
                described = _layout("state.pt", "state.pt", state, crc, {})
                made = described.image(described.memories())
            except (ValueError, LookupError, zipfile.BadZipFile):
                return False
            joined = b"".join(view.tobytes() for view in made.views(0, made.size_bytes))
            if joined != Path(file).read_bytes():
                return False
    return True
