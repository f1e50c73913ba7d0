"""Checks: stock `torch.save` through a writer's stream."""

from __future__ import annotations

import functools
import gc
import io
import warnings
from typing import Any

import torch

from iobench.testing.check import check
from iobench.testing.content import content
from iobench.testing.harness import WriterHarness, expect, expect_raises

_NAMES = (
    *("float64", "float32", "float16", "bfloat16", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
)


def _dtypes() -> list[torch.dtype]:
    """Return every dtype of this torch; torch's one warning about complex32 is ignored here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.empty(1, dtype=torch.complex32)
    return [getattr(torch, name) for name in _NAMES if hasattr(torch, name)]


def _tensor(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    raw = torch.from_numpy(content(count * dtype.itemsize, seed))
    return (raw & 1).bool() if dtype is torch.bool else raw.clone().view(dtype)


@functools.cache
def _state() -> dict[str, object]:
    shared = torch.arange(3000, dtype=torch.float32)
    by_name = {str(dtype): _tensor(dtype, 999, n) for n, dtype in enumerate(_dtypes())}
    return {
        **by_name,
        "large": _tensor(torch.bfloat16, 700_001, 1),
        "transposed": torch.arange(12).reshape(3, 4).t(),
        "shared": [shared, shared[10:20]],
        "step": 1234,
        "name": "été",
    }


def _file(harness: WriterHarness, size: int | None = None) -> Any:
    """Open a stream to model.pt. Any: torch's type hints require IO[bytes], not RawIOBase."""
    return harness.open("model.pt", size)


@functools.cache
def _stock() -> bytes:
    """Return what stock torch.save writes for the state."""
    stock = io.BytesIO()
    torch.save(_state(), stock)
    return stock.getvalue()


@check()
def torch_save_in_one_line(harness: WriterHarness) -> None:
    """`torch.save(obj, writer.open(path))` alone leaves the file of stock torch.save."""
    torch.save(_state(), _file(harness))
    harness.expect_stored("model.pt", _stock())


@check(needs_storage=False)
def torch_save_as_stock(harness: WriterHarness) -> None:
    """torch.save through a stream stores the bytes of stock torch.save, and counts them."""
    with _file(harness, size=len(_stock())) as stream:
        torch.save(_state(), stream)
    harness.expect_stored("model.pt", _stock())
    assert stream.transfer is not None
    moved = stream.transfer.bytes
    expect(moved == len(_stock()), f"the Transfer has {moved} bytes of {len(_stock())}")


@check()
def unpicklable_leaves_nothing(harness: WriterHarness) -> None:
    """If torch.save fails in the middle, no new file appears and an old one is unchanged."""
    broken = {"weight": torch.zeros(100_000), "function": lambda: None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of the stream that torch.save dropped
        error = expect_raises(Exception, lambda: torch.save(broken, _file(harness)))
        expect("lambda" in str(error) or "local" in str(error), f"another failure: {error!r}")
        gc.collect()
        harness.expect_nothing("model.pt")
        harness.put("model.pt", b"the last good one")
        expect_raises(Exception, lambda: torch.save(broken, _file(harness)))
        gc.collect()
    harness.expect_stored("model.pt", b"the last good one")
    harness.expect_no_leftovers()
