"""States to save, and writers that wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from iobench.writers.buffered import BufferedWriter
from iobench.writers.transfer import Transfer


@pytest.fixture(scope="session")
def expect_same() -> Callable[[Any, Any], None]:
    """The two states have the same types, keys and bits everywhere."""
    return _expect_same


def _expect_same(want: Any, have: Any, path: str = "state") -> None:
    assert type(have) is type(want), path
    if isinstance(want, torch.Tensor):
        assert (have.dtype, have.shape) == (want.dtype, want.shape), path
        bits = [_bits(tensor) for tensor in (want, have)]
        assert torch.equal(*bits), path
    elif isinstance(want, np.ndarray):
        assert (have.dtype, have.shape) == (want.dtype, want.shape), path
        assert have.tobytes() == want.tobytes(), path
    elif isinstance(want, dict):
        assert list(have) == list(want), path
        for key in want:
            _expect_same(want[key], have[key], f"{path}[{key!r}]")
    elif isinstance(want, list | tuple):
        assert len(have) == len(want), path
        for index, items in enumerate(zip(want, have, strict=True)):
            _expect_same(*items, f"{path}[{index}]")
    elif isinstance(want, float | complex):
        assert repr(have) == repr(want), path
    else:
        assert have == want, path


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.resolve_conj().resolve_neg().contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


class GatedWriter(BufferedWriter):
    """Writes a checkpoint when the test permits it; `begun` shows that it waits, `error` makes it
    fail."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.gate = threading.Semaphore(0), threading.Semaphore(0)
        self.error: Exception | None = None

    def write_many(self, images: Any, target: Any, **options: Any) -> Transfer:
        self.begun.release()
        self.gate.acquire()
        if self.error:
            error, self.error = self.error, None
            raise error
        return super().write_many(images, target, **options)

    def let(self, count: int = 1) -> None:
        """Let `count` checkpoints be written."""
        self.gate.release(count)


@pytest.fixture
def gated() -> Iterator[GatedWriter]:
    """A writer that the test controls; at the end it writes everything."""
    writer = GatedWriter()
    yield writer
    writer.let(1000)
