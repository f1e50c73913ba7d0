"""The file of `torch.save(state, path)` as an image, identical to stock, without copied storages.

Stock torch writes everything except the storages: with `torch.serialization.skip_data` it leaves
gaps for them. The image fills the gaps with the storages' own memory and adds their CRC32s, which
torch cannot know. So the zip has the layout of the installed torch version. The checksums cost
little, because they are computed while the file is written (docs/decisions/0034).

Some files have no image, and callers let torch write them: the format before torch 1.6, tensors
without a storage of their own (quantized, nested), and files of an unknown torch version.
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

_STREAM = "archive"  # torch's name of the zip folder for a stream and for a non-ASCII path


def image(
    path: str, state: Any, target: str | Path = "", *, crc: bool = True, **options: Any
) -> FileImage | None:
    """Return the image of the file of `torch.save(state, target/path, **options)`.

    Returns None for a state without an image (see the module), and for storages on other devices
    than CPU and CUDA. The image shares the storages' memory: they must not change during the write.
    `crc=False` leaves out the CRC32, like torch.serialization.set_crc32_options(False). `options`
    are those of torch.save. Passes on what pickling raises. Storages on a CUDA device are copied to
    the host piece by piece for their CRC32.
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
    if not options.get("_use_new_zipfile_serialization", True) or not _is_like_stock():
        return None
    whole = os.path.join(target, path)
    name = os.path.basename(path) if whole.isascii() else _STREAM
    try:
        return _layout(path, name, state, crc, options)
    except RuntimeError as error:
        if "skip_data" in str(error):  # torch refuses tensors without storages in this mode
            return None
        raise


def _layout(path: str, name: str, state: Any, crc: bool, options: Mapping[str, Any]) -> TorchLayout:
    """Return the layout of the file `path` as torch writes it under the ASCII name `name`."""
    with tempfile.TemporaryDirectory(prefix="iobench-torch-") as directory:
        skeleton = os.path.join(directory, name)
        with _ascii(directory) as there:
            storages = _save_skeleton(state, os.path.join(there, name), crc, options)
        with open(skeleton, "rb") as file:
            return TorchLayout.read(path, file, storages, crc=crc)


@contextmanager
def _ascii(directory: str) -> Iterator[str]:
    """Yield an ASCII path of `directory`: torch names the zip folder after the file only then."""
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
    """Write everything except the storages to `path`. Return the storages by key in the file."""
    storages: dict[str, torch.UntypedStorage] = {}
    stock: Any = options.get("pickle_module", pickle)

    class Recorder(stock.Pickler):  # type: ignore[misc]
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

    module = types.SimpleNamespace(Pickler=Recorder, __name__=stock.__name__)
    with torch.serialization.skip_data(), crc32_setting(crc):
        torch.save(state, path, **{**options, "pickle_module": module})
    return storages


@functools.cache
def _is_like_stock() -> bool:
    """Return whether the image of a small state is identical to the file of this torch version."""
    host = torch.device("cpu")  # the default device may be another
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
