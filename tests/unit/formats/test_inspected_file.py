"""Every format detects a file that is replaced between its inspection and its read."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from iobench.errors import DataMismatchError
from iobench.formats import safetensors as st
from iobench.formats import torch_file
from iobench.writers.buffered import BufferedWriter
from iobench.writers.image import FileImage
from iobench.writers.transfer import Transfer

_State = Mapping[str, torch.Tensor]


class _ReplacesFirst(BufferedWriter):
    """Before the read, another file of the same size gets the name."""

    other = b""

    def read(self, image: FileImage, target: str | Path, **where: int) -> Transfer:
        Path(target, image.path).write_bytes(self.other)
        return super().read(image, target, **where)


def _zip(state: _State) -> bytes:
    file = io.BytesIO()
    torch.save(dict(state), file)
    return file.getvalue()


_FORMATS: dict[str, tuple[Callable[[_State], bytes], Callable[..., object]]] = {
    "torch": (_zip, torch_file.load),
    "safetensors": (lambda state: safetensors.torch.save(dict(state)), st.load),
}


@pytest.mark.parametrize("name", _FORMATS)
@pytest.mark.parametrize("own", [False, True], ids=["one piece", "allocated"])
def test_replaced(name: str, own: bool, tmp_path: Path) -> None:
    """Other names and shapes in the same number of bytes: no tensor is returned, and the error
    names the file."""
    dump, load = _FORMATS[name]
    first = {"a": torch.arange(64.0), "b": torch.zeros(8, 8)}
    other = dump({"b": torch.arange(64.0), "c": torch.zeros(8, 8)})
    (tmp_path / "model").write_bytes(dump(first))
    assert (tmp_path / "model").stat().st_size == len(other)
    writer = _ReplacesFirst()
    writer.other = other
    how = {"allocate": lambda size: np.zeros(size, np.uint8)} if own else {}
    with pytest.raises(DataMismatchError, match=r"model: was changed while it was read .* again$"):
        load("model", tmp_path, writer, **how)


@pytest.mark.parametrize("name", _FORMATS)
def test_written_anew(name: str, tmp_path: Path) -> None:
    """The same bytes, written again, are the same file."""
    dump, load = _FORMATS[name]
    state = {"a": torch.arange(64.0)}
    (tmp_path / "model").write_bytes(dump(state))
    writer = _ReplacesFirst()
    writer.other = dump(state)
    found, _ = load("model", tmp_path, writer)
    assert torch.equal(found["a"], state["a"])
