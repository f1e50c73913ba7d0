"""Assertions for checks. They raise AssertionError under `python -O` too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from iobench.writers.image import Bytes

_E = TypeVar("_E", bound=BaseException)


def expect(holds: object, otherwise: str) -> None:
    """Raise AssertionError with the text `otherwise` unless `holds`."""
    if not holds:
        raise AssertionError(otherwise)


def expect_same(found: bytes | Bytes | None, wanted: bytes | Bytes, what: str) -> None:
    """Raise AssertionError unless both hold equal bytes. It names the first byte that differs."""
    if found is None:
        raise AssertionError(f"{what}: does not exist, {len(wanted)} bytes were expected")
    have, want = (np.frombuffer(x, dtype=np.uint8) for x in (found, wanted))
    if len(have) != len(want):
        raise AssertionError(f"{what}: {len(have)} bytes, {len(want)} were expected")
    if not np.array_equal(have, want):
        first = int(np.argmax(have != want))
        raise AssertionError(
            f"{what}: byte {first} of {len(want)} is {have[first]}, {want[first]} was expected"
        )


def expect_raises(kind: type[_E], call: Callable[..., Any], *args: Any, **kwargs: Any) -> _E:
    """Return the error of `kind` that `call(*args, **kwargs)` raises.

    Raises AssertionError if the call raises nothing. An error of another kind propagates.
    """
    try:
        call(*args, **kwargs)
    except kind as error:
        # Its frames keep objects alive whose descriptors and threads the caller counts.
        return error.with_traceback(None)
    raise AssertionError(f"{kind.__name__} was expected, nothing was raised")
