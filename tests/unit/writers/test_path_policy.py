"""PathPolicy: the choice in each situation."""

from __future__ import annotations

import pytest

from iobench.units import GIB, KIB, MIB
from iobench.writers.direct.policy import (
    Decision,
    IoOperation,
    IoPath,
    PathPolicy,
    Position,
    Pressure,
)

_SMALL = 256 * KIB
_BLOCK = 8 * MIB
_FREE = Pressure(total_bytes=64 * GIB, available_bytes=32 * GIB)
_SHORT = Pressure(total_bytes=64 * GIB, available_bytes=GIB)
_DIRTY = Pressure(
    total_bytes=64 * GIB, available_bytes=32 * GIB, dirty_bytes=6 * GIB, throttle_bytes=5 * GIB
)
_ALL = tuple(IoPath)
_LARGE = IoOperation(size_bytes=_BLOCK)


def _op(size: int, position: Position = Position.MIDDLE, **more: bool) -> IoOperation:
    return IoOperation(size_bytes=size, position=position, **more)


@pytest.mark.parametrize(
    ("operation", "pressure", "path", "reason"),
    [
        (_op(100, Position.WHOLE), _FREE, "buffered", "small file"),
        (_op(_SMALL - 1, Position.WHOLE), _FREE, "buffered", "small file"),
        (_op(_SMALL, Position.WHOLE), _FREE, "direct", "large, staged"),
        (_op(4096, Position.FIRST), _FREE, "buffered", "header"),
        (_op(1, Position.TAIL), _FREE, "buffered", "tail"),
        (_op(_SMALL - 1, Position.TAIL), _FREE, "buffered", "tail"),
        (_op(4096), _FREE, "buffered", "small"),
        (_op(4096, Position.WHOLE), _SHORT, "uncached", "small file, memory is short"),
        (_op(4096, Position.TAIL), _DIRTY, "uncached", "tail, much is dirty"),
        (_op(_BLOCK, Position.FIRST), _FREE, "direct", "large, staged"),
        (_op(_BLOCK), _FREE, "direct", "large, staged"),
        (_op(_BLOCK, Position.TAIL), _FREE, "direct", "large, staged"),
        (_op(_BLOCK, memory_aligned=True), _FREE, "direct", "large"),
        (_op(_BLOCK, memory_aligned=True), _SHORT, "direct", "large"),
        (_op(_BLOCK, aligned=False), _FREE, "uncached", "unaligned"),
        (_op(_BLOCK, aligned=False), _DIRTY, "uncached", "unaligned"),
        (_op(_BLOCK, in_cache=True), _FREE, "buffered", "in the page cache"),
        (_op(100, Position.WHOLE, in_cache=True), _SHORT, "buffered", "in the page cache"),
    ],
)
def test_situations(operation: IoOperation, pressure: Pressure, path: str, reason: str) -> None:
    """If all paths are available, each situation has one path and one reason."""
    chosen = PathPolicy(small_size=_SMALL).choose(operation, pressure)
    assert chosen == Decision(path=IoPath(path), reason=reason)


@pytest.mark.parametrize(
    ("pressure", "path", "reason"),
    [
        (_FREE, "buffered", "read soon"),
        (_SHORT, "direct", "large, memory is short"),
        (_DIRTY, "direct", "large, much is dirty"),
    ],
)
def test_read_soon(pressure: Pressure, path: str, reason: str) -> None:
    """Files that are read soon stay in memory, unless it is short or too much is dirty."""
    policy = PathPolicy(small_size=_SMALL, read_soon=True)
    chosen = policy.choose(_op(_BLOCK, memory_aligned=True), pressure)
    assert chosen == Decision(path=IoPath(path), reason=reason)


@pytest.mark.parametrize(
    ("paths", "operation", "pressure", "path"),
    [
        (("direct", "buffered"), _op(_BLOCK), _FREE, "direct"),
        (("direct", "buffered"), _op(_BLOCK, aligned=False), _FREE, "buffered"),
        (("direct", "buffered"), _op(100), _SHORT, "buffered"),
        (("uncached", "buffered"), _op(_BLOCK), _FREE, "uncached"),
        (("buffered",), _op(_BLOCK), _SHORT, "buffered"),
        (("uncached",), _op(100), _FREE, "uncached"),
        (("direct",), _op(100), _FREE, "direct"),
    ],
)
def test_fewer_paths(
    paths: tuple[str, ...], operation: IoOperation, pressure: Pressure, path: str
) -> None:
    """If a path is missing, the next best allowed one is chosen."""
    policy = PathPolicy([IoPath(one) for one in paths], small_size=_SMALL)
    assert policy.choose(operation, pressure).path == path


def test_dropped_paths() -> None:
    """A path that is dropped is not chosen again, and the last one cannot be dropped."""
    policy = PathPolicy(small_size=_SMALL)
    assert policy.drop(IoPath.DIRECT)
    assert policy.choose(_LARGE) == Decision(path=IoPath.UNCACHED, reason="large")
    assert policy.drop(IoPath.UNCACHED)
    assert policy.choose(_LARGE).path == IoPath.BUFFERED
    assert not policy.drop(IoPath.BUFFERED)
    assert policy.choose(_LARGE).path == IoPath.BUFFERED
