"""CUDA memory: the order of streams and events, pinning, errors. torch.cuda is played here.

The same with a real GPU is in tests/integration/test_gpu.py.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from iobench.errors import TransferError, UsageError
from iobench.writers.blocks.workers import BlockPool
from iobench.writers.device import cuda


class _Cuda:
    """The parts of torch.cuda that are used; each call is noted in `log`."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.registered: dict[int, int] = {}
        self.refuse = 0
        log = self.log

        class Stream:
            def __init__(self, device=None, name="side"):
                self.name = name

            def wait_stream(self, other):
                log.append(f"{self.name} waits for {other.name}")

            def synchronize(self):
                log.append(f"host waits for {self.name}")

        class Event:
            def __init__(self, blocking):
                assert blocking

            def record(self, stream):
                log.append(f"event on {stream.name}")

            def synchronize(self):
                log.append("host waits for event")

        self.Stream, self.Event = Stream, Event

    def current_device(self):
        return 0

    def current_stream(self, device):
        return self.Stream(name="current")

    @contextmanager
    def stream(self, stream):
        self.log.append(f"copies on {stream.name}")
        yield

    def cudart(self):
        def register(address, size, flags):
            assert flags == 1
            if self.refuse:
                return self.refuse
            self.registered[address] = size
            return 0

        def unregister(address):
            del self.registered[address]
            return 0

        return SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> _Cuda:
    """A replacement of torch.cuda."""
    fake = _Cuda()
    for name in ("Stream", "Event", "stream", "current_stream", "current_device", "cudart"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    return fake


def _bytes(tensor: torch.Tensor) -> cuda.CudaBytes:
    """CudaBytes over CPU memory, which torch copies in the same way."""
    memory = object.__new__(cuda.CudaBytes)
    memory.tensor, memory.device = tensor, cuda.CudaDevice(0)
    return memory


def test_a_lane_begins_behind_the_callers_stream(played: _Cuda) -> None:
    """It waits for the current stream before its copies. A mark is an event, and closing waits."""
    memory = _bytes(torch.arange(8, dtype=torch.uint8))
    lane = memory.device.lane()
    block = np.zeros(4, dtype=np.uint8)
    lane.copy(memory[2:6], block)
    mark = lane.mark()
    mark.wait()
    lane.close()
    assert block.tolist() == [2, 3, 4, 5]
    assert played.log == [
        "side waits for current",
        "copies on side",
        "event on side",
        "host waits for event",
        "host waits for side",
    ]


def test_copies_to_the_device(played: _Cuda) -> None:
    """Host memory, also read-only memory, and memory of the device are copied to it."""
    memory = _bytes(torch.zeros(6, dtype=torch.uint8))
    lane = memory.device.lane()
    lane.copy(np.array([1, 2], dtype=np.uint8), memory[:2])
    lane.copy(np.frombuffer(b"\x03\x04", dtype=np.uint8), memory[2:4])
    lane.copy(memory[:2], memory[4:])
    assert memory.tensor.tolist() == [1, 2, 3, 4, 1, 2]


def test_blocks_are_pinned_once_and_let_go(played: _Cuda) -> None:
    """The memory of a pool's blocks is registered once, for as long as it exists."""
    device = cuda.CudaDevice(0)
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


def test_memory_that_shares_its_pages_is_not_pinned(played: _Cuda) -> None:
    """Only whole pages are registered."""
    assert cuda.CudaDevice(0).pin(np.empty(100, dtype=np.uint8)[3:]) is None
    assert not played.registered


def test_a_refusal_to_pin_is_reported(played: _Cuda) -> None:
    """The reason is cudaHostRegister's error; memory that is pinned already is not an error."""
    played.refuse = 2
    block = BlockPool(4 << 20).take()
    reason = cuda.CudaDevice(0).pin(block)
    assert reason is not None
    assert "CUDA error 2" in reason
    played.refuse = 712
    assert cuda.CudaDevice(0).pin(block) is None


def test_cuda_errors_are_transfer_errors(played: _Cuda, monkeypatch) -> None:
    """One line, for any RuntimeError of torch."""

    def fail(self):
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel ...")

    lane = cuda.CudaDevice(0).lane()
    monkeypatch.setattr(played.Stream, "synchronize", fail)
    with pytest.raises(TransferError, match=r"cuda:0: CUDA error: an illegal.*encountered$"):
        lane.close()


def test_only_flat_bytes() -> None:
    """CudaBytes are one contiguous dimension of uint8."""
    for tensor in (torch.ones(4), torch.ones(2, 2, dtype=torch.uint8)):
        with pytest.raises(UsageError, match="one contiguous dimension"):
            cuda.CudaBytes(tensor)
