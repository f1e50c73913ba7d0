"""CUDA memory: the order of streams and events, devices of threads, pinning, errors."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from support.fake_cuda import FakeCuda
from support.forked import in_child

from iobench.errors import TransferError, UsageError
from iobench.testing import content
from iobench.writers import registry
from iobench.writers.blocks.workers import BlockPool
from iobench.writers.device import cuda, staging
from iobench.writers.device.staging import DeviceCopies
from iobench.writers.image import DeviceBytes, FileImage


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """A replacement of torch.cuda."""
    yield FakeCuda(monkeypatch)
    staging._pools.clear()  # pinned blocks that are kept for the next transfer
    gc.collect()


def _bytes(tensor: torch.Tensor, index: int = 0) -> DeviceBytes:
    """Return CPU memory as that of a GPU: torch copies it in the same way."""
    return DeviceBytes(tensor, cuda._cuda_device(index))


def test_a_stream_begins_behind_the_callers_stream(played: FakeCuda) -> None:
    """It waits for the current stream before its copies, and for an event after them."""
    memory = _bytes(torch.arange(8, dtype=torch.uint8))
    stream = memory.device.stream()
    block = np.zeros(4, dtype=np.uint8)
    stream.copy(_bytes(memory.tensor[2:6]), block)
    stream.wait()
    assert block.tolist() == [2, 3, 4, 5]
    assert played.log == [
        "side waits for current",
        "copies on side",
        "event on side",
        "host waits for event",
    ]


def test_copies_to_the_device(played: FakeCuda) -> None:
    """Host memory, also read-only memory, and memory of the device are copied to it."""
    memory = _bytes(torch.zeros(6, dtype=torch.uint8))
    stream = memory.device.stream()
    parts = [_bytes(part) for part in memory.tensor.split(2)]
    stream.copy(np.array([1, 2], dtype=np.uint8), parts[0])
    stream.copy(np.frombuffer(b"\x03\x04", dtype=np.uint8), parts[1])
    stream.copy(parts[0], parts[2])
    assert memory.tensor.tolist() == [1, 2, 3, 4, 1, 2]


def _in_thread(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


@pytest.mark.parametrize("writer", ["buffered", "odirect", "hybrid"])
def test_no_context_on_another_device(writer: str, played: FakeCuda, tmp_path) -> None:
    """Writers' threads, the collector's finalizers and copies use the memory's device only.

    A new thread has device 0. There each call takes half a GiB, in every rank of the node.
    """
    made = registry.make(writer, block_size="64KiB")
    if not (answer := made.available(tmp_path)).ok:
        pytest.skip(answer.reason)
    data = torch.from_numpy(content(400_000))
    image = FileImage.of("f", [_bytes(part, 3) for part in data.split(100_000)])
    device, blocks = cuda._cuda_device(3), [BlockPool(4 << 20).take()]
    with played.device(3):
        copies = DeviceCopies([device])
    _in_thread(lambda: device.pin(blocks[0]))
    _in_thread(lambda: copies.on(device).copy(_bytes(data, 3), blocks[0][: len(data)]))
    _in_thread(lambda: device.allocate(4096))
    _in_thread(copies.wait)
    _in_thread(lambda: made.write(image, tmp_path))
    assert (tmp_path / "f").read_bytes() == data.numpy().tobytes()
    blocks.clear()
    gc.collect()
    assert played.contexts == {3}


def test_new_memory_is_not_in_use(played: FakeCuda) -> None:
    """Kernels that still use memory which torch hands out again have ended; it is aligned."""
    memory = cuda.Device(0).allocate(16 << 20)
    assert len(memory) == 16 << 20
    assert memory.address % 4096 == 0
    assert played.log[0] == f"allocates {16 << 20}"
    assert played.log[-1] == "host waits for current"


def test_a_forked_child_frees_pinned_memory(played: FakeCuda) -> None:
    """It does not call CUDA, which must not be used there."""
    blocks = [BlockPool(4 << 20).take()]
    cuda.Device(0).pin(blocks[0])

    def free() -> None:
        blocks.clear()
        gc.collect()
        assert played.registered

    in_child(free)
    assert len(played.registered) == 1
    blocks.clear()
    gc.collect()
    assert not played.registered


def test_blocks_are_pinned_once_and_let_go(played: FakeCuda) -> None:
    """The memory of a pool's blocks is registered once, for as long as it exists."""
    device = cuda.Device(0)
    pool = BlockPool(64 << 10)
    blocks = [pool.take() for _ in range(3)]
    for block in (*blocks, blocks[0][100:200]):
        assert device.pin(block) is None
    assert len(played.registered) == 1
    ((address, size),) = played.registered.items()
    for block in blocks:
        assert address <= block.ctypes.data
        assert block.ctypes.data + len(block) <= address + size
    del blocks, block, pool
    gc.collect()
    assert not played.registered


def test_memory_that_shares_its_pages_is_not_pinned(played: FakeCuda) -> None:
    """Only whole pages are registered."""
    assert cuda.Device(0).pin(np.empty(100, dtype=np.uint8)[3:]) is None
    assert not played.registered


def test_a_refusal_to_pin_is_reported(played: FakeCuda) -> None:
    """The reason is cudaHostRegister's error; memory that is pinned already is not an error. No
    error is left, which torch would raise at the next kernel of the trainer."""
    played.refuse = 2
    block = BlockPool(4 << 20).take()
    reason = cuda.Device(0).pin(block)
    assert reason is not None
    assert "CUDA error 2" in reason
    played.launch()
    played.refuse = 712
    assert cuda.Device(0).pin(block) is None
    played.launch()


def test_cuda_errors_are_transfer_errors(played: FakeCuda, monkeypatch) -> None:
    """One line, for any RuntimeError of torch."""

    def fail(self):
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel ...")

    stream = cuda.Device(0).stream()
    monkeypatch.setattr(played.Event, "synchronize", fail)
    with pytest.raises(TransferError, match=r"cuda:0: CUDA error: an illegal.*encountered$"):
        stream.wait()


def test_only_flat_bytes() -> None:
    """DeviceBytes are one contiguous dimension of uint8."""
    for tensor in (torch.ones(4), torch.ones(2, 2, dtype=torch.uint8)):
        with pytest.raises(UsageError, match="one contiguous dimension"):
            cuda.device_bytes(tensor)
