"""The file of `torch.save(state, path)` as an image, identical to stock, without copied storages.

Stock torch pickles the state and names its storages, but is stopped before it writes them. The
image has their own memory and adds their CRC32s. The checksums cost little, because they are
computed while the file is written (docs/decisions/0034). No setting of torch is changed meanwhile:
the state's own methods and signal handlers may call torch.save and torch.load.

Some files have no image, and callers let torch write them: the format before torch 1.6, and files
of an unknown torch version.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
import threading
import types
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.serialization import DEFAULT_PROTOCOL

from iobench.formats.torch_layout import TorchLayout
from iobench.formats.torch_zip import Recorded
from iobench.writers.image import FileImage

_LAST = "byteorder"  # the last record before the storages
STREAM = "archive"
"""torch's name of the zip folder for a stream, and for a path that is not ASCII."""

_settings_lock = threading.RLock()
"""Held while torch's settings differ from the caller's."""


def image(
    path: str, state: Any, target: str | Path = "", *, crc: bool = True, **options: Any
) -> FileImage | None:
    """Return the image of the file of `torch.save(state, target/path, **options)`.

    Returns None for a state without an image (see the module), and for storages on other devices
    than CPU and CUDA. The image shares the storages' memory: they must not change during the write.
    `crc=False` leaves out the CRC32, like torch.serialization.set_crc32_options(False). `options`
    are those of torch.save. Passes on what pickling raises.
    """
    found = layout(path, state, target, crc=crc, **options)
    if found is None or not found.devices <= {"cpu", "cuda"}:
        return None
    return found.image(found.memories())


def layout(
    path: str, state: Any, target: str | Path = "", *, crc: bool = True, **options: Any
) -> TorchLayout | None:
    """Return torch's own bytes of that file and the position of each storage, on any device.

    The storages' bytes are not read. Returns None for a state without an image (see the module).
    """
    if not options.get("_use_new_zipfile_serialization", True) or not is_like_stock():
        return None
    whole = os.path.join(target, path)
    folder = _folder(os.path.basename(path)) if whole.isascii() else STREAM
    return _layout(path, folder, state, crc, options)


def _layout(
    path: str, folder: str, state: Any, crc: bool, options: Mapping[str, Any]
) -> TorchLayout:
    records, storages = _pickled(state, **options)
    alignment: int = torch.serialization._get_storage_alignment()
    return TorchLayout.of(path, folder, records, storages, alignment=alignment, crc=crc)


def _folder(name: str) -> str:
    """Return the folder in the zip of a file of this ASCII name: without its last suffix.

    The rule of torch is in caffe2/serialize/inline_container.cc. It takes a backslash for a slash.
    Raises RuntimeError, like torch, if nothing is left.
    """
    base = name.rpartition("\\")[2]
    folder = base[: base.rfind(".")] if "." in base else base
    if not folder:
        raise RuntimeError(f"invalid file name: {name}")
    return folder


class _Complete(Exception):  # noqa: N818 -- no error
    """All records before the storages are written."""


class _Records:
    """The zip file that torch writes to: it keeps the records before the storages."""

    def __init__(self) -> None:
        self.written: list[Recorded] = []

    def write_record(self, name: str, data: str | bytes, size: int) -> None:
        self.written.append(Recorded(name, data.encode() if isinstance(data, str) else data))
        if len(self.written[-1].data) != size:
            raise ValueError(f"torch wrote {name} in an unknown way")
        if name == _LAST:
            raise _Complete


def _pickled(
    state: Any,
    pickle_module: Any = pickle,
    pickle_protocol: int = DEFAULT_PROTOCOL,
    _disable_byteorder_record: bool = False,
    _use_new_zipfile_serialization: bool = True,
) -> tuple[list[Recorded], list[torch.UntypedStorage]]:
    """Return the records that torch writes before the storages, and the storages by key."""
    storages: dict[str, torch.UntypedStorage] = {}

    class Recorder(pickle_module.Pickler):  # type: ignore[misc]  # known at run time only
        """Base class of torch's pickler, whose persistent_id returns the key of each storage."""

        def __init_subclass__(cls) -> None:
            original = cls.persistent_id

            def persistent_id(self: Any, value: Any) -> Any:
                found = original(self, value)
                if found is not None:
                    typed = isinstance(value, torch.storage.TypedStorage)
                    storages[found[2]] = value._untyped_storage if typed else value
                return found

            cls.persistent_id = persistent_id

    module = types.SimpleNamespace(Pickler=Recorder, __name__=pickle_module.__name__)
    made = _Records()
    with suppress(_Complete):
        torch.serialization._save(state, made, module, pickle_protocol, False)
        raise ValueError(f"torch wrote no record {_LAST}")
    if list(storages) != [str(key) for key in range(len(storages))]:
        raise ValueError("torch numbered the storages in an unknown way")
    return made.written[: -1 if _disable_byteorder_record else None], list(storages.values())


@functools.cache
def is_like_stock() -> bool:
    """Return whether the images of two states are identical to the files of this torch version."""
    host = torch.device("cpu")  # the default device may be another
    some, none = torch.arange(9, device=host), torch.zeros(0, device=host)
    state = {"a": torch.arange(5.0, device=host), "b": [some[2:4], none], "c": 1}
    try:
        return all(_is_stocks(state, crc) for crc in (True, False))
    except (ValueError, LookupError, TypeError, AttributeError, zipfile.BadZipFile):
        return False


def _is_stocks(state: Any, crc: bool) -> bool:
    stock = io.BytesIO()
    with crc32_setting(crc):
        torch.save(state, stock)
    described = _layout(STREAM, STREAM, state, crc, {})
    made = described.image(described.memories())
    return b"".join(view.tobytes() for view in made.views(0, made.size_bytes)) == stock.getvalue()


@contextmanager
def crc32_setting(enabled: bool) -> Iterator[None]:
    """Turn torch.save's CRC32 on or off inside the block. Other threads wait at the block."""
    with _settings_lock:
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(enabled)
        try:
            yield
        finally:
            torch.serialization.set_crc32_options(before)
