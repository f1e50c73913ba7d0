"""Writers for the formats, tensors of every kind, and a comparison of tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from iobench.formats.tensors import tensor_bytes
from iobench.writers import registry
from iobench.writers.base import Writer

_WRITERS = ("buffered", "uncached", "odirect")


@pytest.fixture(params=_WRITERS)
def writer(request: pytest.FixtureRequest, tmp_path: Path) -> Writer:
    """Each writer that stores, with blocks so small that files take several."""
    made = registry.make(request.param, block_size="4KiB")
    answer = made.available(tmp_path)
    if not answer.ok:
        pytest.skip(f"{answer.reason} {answer.remedy}")
    return made


@pytest.fixture
def buffered() -> Writer:
    """The writer that works everywhere."""
    return registry.make("buffered")


@pytest.fixture
def same() -> Callable[[torch.Tensor, torch.Tensor], bool]:
    """Whether two tensors have equal dtype, shape, strides and bits."""

    def check(a: torch.Tensor, b: torch.Tensor) -> bool:
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and a.stride() == b.stride()
            and tensor_bytes(a).tobytes() == tensor_bytes(b).tobytes()
        )

    return check


@pytest.fixture
def random_tensor() -> Callable[..., torch.Tensor]:
    """Make a tensor of any dtype with random bytes, the same for the same seed."""

    def make(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        size = torch.Size(shape).numel() * dtype.itemsize
        raw = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        if dtype is torch.bool:
            raw &= 1
        return raw.view(dtype).reshape(shape)

    return make
