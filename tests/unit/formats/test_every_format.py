"""What every format does: it detects a file that is replaced between its inspection and its read,
saves from device memory and restores to it, and takes a writer as a text."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from support.fake_device import FakeBytes, FakeDevice

import iobench
from iobench.errors import DataMismatchError, UsageError
from iobench.formats import safetensors as st
from iobench.formats import torch_file
from iobench.writers import registry
from iobench.writers.buffered import BufferedWriter
from iobench.writers.device import cuda
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
    names the file. The same bytes, written again, are the same file."""
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
    found, _ = load("model", tmp_path, writer, **how)
    assert found.keys() == {"b", "c"}


def _state() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {
        "weight": torch.randn(300, 70).to(torch.bfloat16),
        "bias": torch.randn(70),
        "step": torch.tensor(7),
        "none": torch.empty(0, 3),
    }


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """A device that CPU tensors are taken to be on, and that files are restored to."""
    fake = FakeDevice()

    def device_bytes(flat: torch.Tensor) -> FakeBytes:
        return FakeBytes(fake, flat.numpy())

    def allocate_on(device: str) -> object:
        return fake.allocate if device == "cuda" else None

    for module in (st, torch_file):
        monkeypatch.setattr(module, "allocate_on", allocate_on)
    monkeypatch.setattr(st, "located_dense", lambda _: None)
    for module in (st, cuda):
        monkeypatch.setattr(
            module, "tensor_memory", lambda t: device_bytes(cuda._flat(t, here=True))
        )
    return fake


@pytest.mark.parametrize("writer", ["buffered", "odirect", "uring", "hybrid"])
def test_safetensors_on_a_device(writer: str, device: FakeDevice, tmp_path: Path) -> None:
    """A file saved from a device is the file; it is restored to a device, tensor by tensor."""
    made = registry.make(writer)
    if not (answer := made.available(tmp_path)).ok:
        pytest.skip(answer.reason)
    state = _state()
    st.save(state, "f", tmp_path, made)
    assert device.copies
    before = device.copies
    found, _ = st.load("f", tmp_path, made, device="cuda")
    assert device.copies > before
    assert not device.pending
    on_host, _ = st.load("f", tmp_path, made)
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor)
        assert torch.equal(on_host[name], tensor)
        assert found[name].dtype == tensor.dtype


def test_torch_file_on_a_device(device: FakeDevice, tmp_path: Path) -> None:
    """Storages of a torch file come back on the device, shared ones shared."""
    writer, state = registry.make("buffered"), _state()
    state["tied"] = state["weight"][:10]
    torch_file.save(state, "f", tmp_path, writer)
    found, _ = torch_file.load("f", tmp_path, writer, device="cuda")
    assert device.copies
    assert not device.pending
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor)
    assert found["tied"].data_ptr() == found["weight"].data_ptr()


@pytest.mark.parametrize(
    ("device", "message"),
    [("cuda:99", "sees no such CUDA device"), ("meta", "cpu or cuda"), ("gpu", "unknown to torch")],
)
def test_devices_that_are_not_there(device: str, message: str, tmp_path: Path) -> None:
    """A device that cannot be had is refused before anything is read."""
    for load in (st.load, torch_file.load):
        with pytest.raises(UsageError, match=message):
            load("f", tmp_path, registry.make("buffered"), device=device)


_TEXT = "buffered,block_size=64KiB"


@pytest.mark.parametrize("in_file", [False, True])
def test_a_writer_as_a_text(in_file: bool, tmp_path: Path) -> None:
    """They save and load, and the Transfer names the writer."""
    writer: str | Path = _TEXT
    if in_file:
        writer = tmp_path / "writer.toml"
        writer.write_text(iobench.dump_writer(iobench.load_writer(_TEXT)))
    state = {"weight": torch.arange(6)}
    saved = [
        st.save(state, "a", tmp_path, writer),
        torch_file.save(state, "b", tmp_path, writer),
    ]
    first, *loaded = st.load("a", tmp_path, writer)
    second, third = torch_file.load("b", tmp_path, writer)
    assert {one.writer for one in (*saved, *loaded, third)} == {"buffered"}
    for found in (first["weight"], second["weight"]):
        assert torch.equal(found, state["weight"])
