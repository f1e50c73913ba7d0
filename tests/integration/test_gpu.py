"""With a real GPU: the suite with CUDA memory, restores to the GPU, and GPUDirect Storage.

docs/gds.md has the plan for the first minutes on a machine with a GPU.

Skipped where torch sees no CUDA device; then tests/conformance/test_device_memory.py and
tests/unit/writers/test_gds.py say the same of a played device.
"""

import functools
import sys

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.captured import captured
from support.fake_device import on_device

import iobench
from iobench import Checkpointer, linux
from iobench.formats import safetensors, torch_file
from iobench.integrations.dcp import StorageWriter
from iobench.testing import Check, writer_checks
from iobench.writers import registry
from iobench.writers.device.cuda import cuda_device

_CUDA = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(not _CUDA, reason=f"torch {torch.__version__} sees no CUDA device")
_WRITERS = ("buffered", "uncached", "odirect", "uring", "hybrid", "aiofiles", "gds")
if not _CUDA:
    _WRITERS = _WRITERS[:1]  # one test of each kind to be skipped, not 750


class _Gpu:
    """The current CUDA device, for `on_device`: memory goes there on a stream that is kept busy."""

    def upload(self, data: np.ndarray) -> object:
        from iobench.writers.device.cuda import device_bytes

        if len(data):
            torch.cuda._sleep(1_000_000)  # the copy below is not done when this returns
        return device_bytes(torch.from_numpy(data.copy()).to("cuda", non_blocking=True))

    def download(self, memory: object) -> np.ndarray:
        return memory.tensor.cpu().numpy()


@pytest.mark.parametrize("mixed", [False, True], ids=["device", "mixed"])
@pytest.mark.parametrize("name", _WRITERS)
@pytest.mark.parametrize("item", writer_checks() if _CUDA else writer_checks()[:1], ids=str)
def test_suite(item: Check, name: str, mixed: bool, tmp_path) -> None:
    """Each claim of the suite holds for CUDA memory."""
    kind = on_device(registry.writer_class(name), _Gpu(), mixed=mixed)
    make = functools.partial(kind, block_size="64KiB")
    if not (answer := make().available(tmp_path)).ok:
        pytest.skip(f"{answer.reason} {answer.remedy}")
    item(make, tmp_path)


@pytest.mark.parametrize("name", _WRITERS)
def test_state_dicts(name: str, tmp_path) -> None:
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
def test_prepared_checkpoints(waits: bool, tmp_path) -> None:
    """`prepare` pins the slots; a background save uses them, also before the thread is done."""
    state = {"w": torch.randn(9_000_001, device="cuda"), "step": 1}
    with Checkpointer(tmp_path, writer="buffered") as ckpt:
        ckpt.prepare(state, wait=waits)
        ckpt.save_async(state, 1)
        assert torch.equal(ckpt.load()["w"], state["w"].cpu())


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("share", [0, 1 / 8, 1 / 2])
def test_a_budget_below_the_state(share: float, lazy: bool, tmp_path) -> None:
    """The bytes are those of the call, after what another stream than the default one computed."""
    weight, turned = (
        torch.zeros(9_000_001, device="cuda"),
        torch.randn(3000, 2000, device="cuda").t(),
    )
    size = weight.nbytes + turned.nbytes
    with (
        Checkpointer(tmp_path, writer="hybrid", budget=int(share * size), lazy=lazy) as ckpt,
        torch.cuda.stream(torch.cuda.Stream()),
    ):
        for step in (1, 2):
            torch.cuda._sleep(50_000_000)
            weight.fill_(step)
            if step == 1:
                want = turned.cpu()
                torch.cuda._sleep(50_000_000)
            save = ckpt.save_async({"w": weight, "t": turned}, step)
            if lazy:
                ckpt.before_optimizer_step()
            weight.fill_(-1)
            assert save.streamed
        ckpt.wait()
        torch.cuda._sleep(50_000_000)
        weight.fill_(3)
        ckpt.save({"w": weight, "t": turned}, 3)
    for step in (1, 2, 3):
        found = iobench.load_checkpoint(tmp_path, step)
        assert (found["w"] == step).all()
        assert torch.equal(found["t"], want)


def test_memory_in_use_is_not_overwritten(tmp_path) -> None:
    """Kernels that still use freed memory do not write into blocks on the GPU, nor read them."""
    writer = registry.make("gds", block_size="16MiB")
    if not (answer := writer.available(tmp_path)).ok:
        pytest.skip(f"{answer.reason} {answer.remedy}")
    state = {"w": torch.randn(40 << 20, device="cuda")}
    for step in range(20):
        late = torch.zeros(16 << 20, dtype=torch.uint8, device="cuda")
        torch.cuda._sleep(50_000_000)
        late.fill_(step)
        del late  # its memory is free for torch, and the fill is still queued
        fresh = registry.make("gds", block_size="16MiB")
        safetensors.save(state, "f", tmp_path, fresh)
        found, _ = safetensors.load("f", tmp_path, registry.make("odirect"), device="cuda")
        assert torch.equal(found["w"], state["w"]), step


@pytest.mark.parametrize("format_", ["torch", "dcp"])
def test_the_bytes_of_stock(format_: str, tmp_path) -> None:
    """A torch file and the items of DCP are those of stock, from the GPU."""
    state = {f"w{n}": torch.randn(n * 300_001 + 1, device="cuda") for n in range(9)}
    writer = registry.make("hybrid")
    if format_ == "torch":
        torch_file.save(state, "ours.pt", tmp_path, writer)
        found = torch.load(tmp_path / "ours.pt")
    else:
        dcp.save(state, storage_writer=StorageWriter(tmp_path / "ours", writer))
        found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        dcp.load(found, checkpoint_id=tmp_path / "ours")
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor)


_OTHER = """
import sys
import torch
from iobench import Checkpointer
from iobench.formats import safetensors
from iobench.writers import registry

last, directory = torch.cuda.device_count() - 1, sys.argv[1]
torch.cuda.set_device(last)
state = {"w": torch.randn(9_000_001, device=f"cuda:{last}")}
for name in ("buffered", "odirect", "hybrid", "gds"):
    writer = registry.make(name)
    if writer.available(directory).ok:
        safetensors.save(state, name, directory, writer)
with Checkpointer(directory, writer="buffered", lazy=True) as ckpt:
    ckpt.prepare(state, wait=True)
    ckpt.save_async(state, 1)
    ckpt.before_optimizer_step()
others = [n for n in range(last) if torch._C._cuda_hasPrimaryContext(n)]
assert not others, f"a context on other GPUs: {others}"
"""


@pytest.mark.skipif(not _CUDA or torch.cuda.device_count() < 2, reason="needs a second GPU")
def test_no_context_on_another_gpu(tmp_path) -> None:
    """A rank that uses the last GPU takes no memory of the first one."""
    command = [sys.executable, "-c", _OTHER, str(tmp_path)]
    done = captured(command)
    assert done.returncode == 0, done.stderr


def test_an_error_of_a_refused_pin_is_gone() -> None:
    """The next kernel of this thread does not raise it."""
    memory = np.zeros(8 << 20, dtype=np.uint8)
    begin = -memory.ctypes.data % 4096
    address = memory.ctypes.data + begin
    device = cuda_device(torch.device("cuda"))
    assert int(torch.cuda.cudart().cudaHostRegister(address, 4 << 20, 0)) == 0
    try:
        pages = np.asarray(_Pages(address, 4 << 20))
        assert device.pin(pages) is None  # registered already, by other code
        torch.ones(3, device="cuda").sum().item()
    finally:
        torch.cuda.cudart().cudaHostUnregister(address)


class _Pages:
    def __init__(self, address: int, size_bytes: int) -> None:
        self.__array_interface__ = linux.array_interface(address, size_bytes)
