"""Formats with device memory: saved from there, restored to there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.fake_device import FakeBytes, FakeDevice

from iobench.errors import UsageError
from iobench.formats import raw, safetensors, torch_file
from iobench.writers import registry
from iobench.writers.device import tensors


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

    for module in (safetensors, torch_file):
        monkeypatch.setattr(module, "allocate_on", allocate_on)
    monkeypatch.setattr(safetensors, "located_dense", lambda _: None)
    for module in (safetensors, raw, tensors):
        monkeypatch.setattr(
            module, "tensor_memory", lambda t: device_bytes(tensors._flat(t, here=True))
        )
    return fake


@pytest.mark.parametrize("writer", ["buffered", "odirect", "uring", "hybrid"])
def test_safetensors(writer: str, device: FakeDevice, tmp_path: Path) -> None:
    """A file saved from a device is the file; it is restored to a device, tensor by tensor."""
    made = registry.make(writer)
    if not (answer := made.available(tmp_path)).ok:
        pytest.skip(answer.reason)
    state = _state()
    safetensors.save(state, "f", tmp_path, made)
    assert device.copies
    before = device.copies
    found, _ = safetensors.load("f", tmp_path, made, device="cuda")
    assert device.copies > before
    assert not device.pending
    on_host, _ = safetensors.load("f", tmp_path, made)
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor)
        assert torch.equal(on_host[name], tensor)
        assert found[name].dtype == tensor.dtype


def test_torch_file(device: FakeDevice, tmp_path: Path) -> None:
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


def test_raw(device: FakeDevice, tmp_path: Path) -> None:
    """Plain bytes too."""
    registry.make("buffered").write(raw.image("f", [_state()["bias"]]), tmp_path)
    assert device.copies
    assert (tmp_path / "f").read_bytes() == _state()["bias"].numpy().tobytes()


@pytest.mark.parametrize(
    ("device", "message"),
    [("cuda:99", "sees no such CUDA device"), ("meta", "cpu or cuda"), ("gpu", "unknown to torch")],
)
def test_devices_that_are_not_there(device: str, message: str, tmp_path: Path) -> None:
    """A device that cannot be had is refused before anything is read."""
    for load in (safetensors.load, torch_file.load):
        with pytest.raises(UsageError, match=message):
            load("f", tmp_path, registry.make("buffered"), device=device)
