"""Pinned: what CUDA answers, played by a double of its runtime."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from iobench.checkpoint.pinning import Pinned
from iobench.errors import UnavailableError


def test_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory is registered and unregistered; a refusal has its code and the remedy.

    For a given device, that device is the current one meanwhile.
    """
    calls: list[tuple[int, ...]] = []
    answer = 0

    def register(*arguments: int) -> int:
        calls.append(arguments)
        return answer

    runtime = SimpleNamespace(
        cudaHostRegister=register, cudaHostUnregister=lambda *a: calls.append(a)
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    memory = np.zeros(4096, np.uint8)
    address = memory.ctypes.data
    Pinned(memory).release()
    assert calls == [(address, 4096, 0), (address,)]
    calls.clear()
    monkeypatch.setattr(torch.cuda, "_exchange_device", lambda number: calls.append((number,)) or 0)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", lambda n: calls.append((n,)) or n)
    Pinned(memory, device=3)
    assert calls == [(3,), (address, 4096, 0), (0,)]
    answer = 2
    with pytest.raises(UnavailableError, match=r"4096 bytes failed with code 2\. .*ulimit -l"):
        Pinned(memory)
