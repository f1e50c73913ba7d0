"""FakeCuda: the parts of torch.cuda that iobench uses, without a GPU.

The same with a real GPU is in tests/integration/test_gpu.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

_real = {"empty": torch.empty, "ones": torch.ones}


class GpuTensor(torch.Tensor):
    """A CPU tensor that says it is on a GPU: `tensor.as_subclass(GpuTensor)`."""

    is_cpu, is_cuda, device = False, True, torch.device("cuda", 0)


class FakeCuda:
    """`log` has the calls in order; `contexts` the devices that have taken memory for a context.

    A call takes a context on the current device of its thread, which is 0 in a new thread. Tensors
    "on" a GPU are on the CPU. `refuse` is the error of cudaHostRegister. A failed call leaves its
    error in the thread until `launch`, which stands for a kernel and raises it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.contexts: set[int] = set()
        self.registered: dict[int, int] = {}
        self.refuse = 0
        self._here = threading.local()
        cuda = self

        class Stream:
            def __init__(self, device: int = 0, name: str = "side") -> None:
                self.device, self.name = device, name
                cuda.touch()

            def wait_stream(self, other: Stream) -> None:
                cuda.log.append(f"{self.name} waits for {other.name}")

            def synchronize(self) -> None:
                cuda.log.append(f"host waits for {self.name}")

        class Event:
            def __init__(self, blocking: bool) -> None:
                assert blocking

            def record(self, stream: Stream) -> None:
                cuda.log.append(f"event on {stream.name}")

            def synchronize(self) -> None:
                cuda.log.append("host waits for event")

        self.Stream, self.Event = Stream, Event
        for name in ("Stream", "Event", "device", "stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        for name in ("current_stream", "current_device", "cudart"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch, "empty", self._empty)
        monkeypatch.setattr(torch, "ones", self._ones)

    def touch(self) -> None:
        """Take a context on the current device."""
        self.contexts.add(self.current_device())

    def current_device(self) -> int:
        return getattr(self._here, "device", 0)

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self._here.device = self.current_device(), index
        try:
            yield
        finally:
            self._here.device = before

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.log.append(f"copies on {stream.name}")
        yield
        self.touch()  # torch sets the previous stream again, which is on the current device

    def current_stream(self, device: int) -> Any:
        del device
        return self.Stream(name="current")

    def cudart(self) -> Any:
        return SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self._unregister)

    def _register(self, address: int, size: int, flags: int) -> int:
        assert flags == 1
        self.touch()
        if self.refuse:
            self._here.error = self.refuse
            return self.refuse
        assert address not in self.registered, "CUDA refuses that"
        self.registered[address] = size
        return 0

    def _unregister(self, address: int) -> int:
        self.touch()
        del self.registered[address]
        return 0

    def launch(self) -> None:
        """Launch a kernel: torch looks for errors after it."""
        self.touch()
        error, self._here.error = getattr(self._here, "error", 0), 0
        if error:
            raise RuntimeError(f"CUDA error {error}")

    def _ones(self, *size: int, device: Any = None, **how: Any) -> torch.Tensor:
        if "cuda" in str(device):
            self.launch()
        return _real["ones"](*size, **how)

    def _empty(self, *size: Any, device: Any = None, **how: Any) -> torch.Tensor:
        if "cuda" not in str(device):
            return _real["empty"](*size, device=device, **how)
        self.touch()
        self.log.append(f"allocates {size[0]}")
        return _real["empty"](size[0] + 512, **how)[512:]  # torch aligns to 512 bytes
