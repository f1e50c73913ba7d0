"""With a real GPU: the suite with CUDA memory, restores to the GPU, and GPUDirect Storage.

Skipped where torch sees no CUDA device; then tests/conformance/test_device_memory.py and
tests/unit/writers/test_gds.py say the same of a played device.
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from support.fake_device import on_device

from iobench import Checkpointer
from iobench.formats import safetensors, torch_file
from iobench.testing import Check, writer_checks
from iobench.writers import registry

_CUDA = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(not _CUDA, reason=f"torch {torch.__version__} sees no CUDA device")
_WRITERS = ("buffered", "uncached", "odirect", "uring", "hybrid", "aiofiles", "gds")
if not _CUDA:
    _WRITERS = _WRITERS[:1]  # one test of each kind to be skipped, not 750


class _Gpu:
    """The current CUDA device, for `on_device`: memory goes there on a stream that is kept busy."""

    def upload(self, data: np.ndarray) -> object:
        from iobench.writers.device.cuda import CudaBytes

        if len(data):
            torch.cuda._sleep(1_000_000)  # the copy below is not done when this returns
        return CudaBytes(torch.from_numpy(data.copy()).to("cuda", non_blocking=True))

    def download(self, memory: object) -> np.ndarray:
        return memory.tensor.cpu().numpy()


@pytest.mark.parametrize("mixed", [False, True], ids=["device", "mixed"])
@pytest.mark.parametrize("name", _WRITERS)
@pytest.mark.parametrize("item", writer_checks() if _CUDA else writer_checks()[:1], ids=str)
def test_suite(item: Check, name: str, mixed: bool, tmp_path: Path) -> None:
    """Each claim of the suite holds for CUDA memory."""
    kind = on_device(registry.writer_class(name), _Gpu(), mixed=mixed)
    make = functools.partial(kind, block_size="64KiB")
    if not (answer := make().available(tmp_path)).ok:
        pytest.skip(f"{answer.reason} {answer.remedy}")
    item(make, tmp_path)


@pytest.mark.parametrize("name", _WRITERS)
def test_state_dicts(name: str, tmp_path: Path) -> None:
    """CUDA state dicts are saved as CPU ones are, and restored to the GPU."""
    writer = registry.make(name)
    if not (answer := writer.available(tmp_path)).ok:
        pytest.skip(f"{answer.reason} {answer.remedy}")
    state = {
        "large": torch.randn(9_000_001, device="cuda"),
        "half": torch.randn(999, device="cuda").to(torch.bfloat16),
        "none": torch.empty(0, device="cuda"),
    }
    for format_ in (safetensors, torch_file):
        format_.save(state, "f", tmp_path, writer)
        found, moved = format_.load("f", tmp_path, writer, device="cuda")
        for key, tensor in state.items():
            assert found[key].device == tensor.device
            assert torch.equal(found[key], tensor)
        if name == "gds" and format_ is safetensors:
            assert "gds" in moved.paths


@pytest.mark.parametrize("waits", [True, False])
def test_prepared_checkpoints(waits: bool, tmp_path: Path) -> None:
    """`prepare` pins the slots; a background save uses them, also before the thread is done."""
    state = {"w": torch.randn(9_000_001, device="cuda"), "step": 1}
    with Checkpointer(tmp_path, writer="buffered") as ckpt:
        ckpt.prepare(state, wait=waits)
        ckpt.save_async(state, 1)
        assert torch.equal(ckpt.load()["w"], state["w"].cpu())
