"""PathPolicy: the choice in each situation, and how measured rates change it."""

from __future__ import annotations

import pytest

from iobench.units import GIB, KIB, MIB
from iobench.writers.hybrid_paths.memory_pressure import Pressure
from iobench.writers.hybrid_paths.policy import Decision, IoOperation, IoPath, PathPolicy, Position

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


class _Storage:
    """Runs operations in sequence at rates that a test sets, on a fake clock.

    An operation takes its size divided by the rate of its path.
    """

    def __init__(self, policy: PathPolicy, **rates: float) -> None:
        self.policy, self.rates = policy, rates

    def run(self, operations: int) -> list[Decision]:
        decisions = []
        for _ in range(operations):
            chosen = self.policy.choose(_LARGE)
            self.policy.learn(chosen.path, _BLOCK, _BLOCK / self.rates[chosen.path])
            decisions.append(chosen)
        return decisions


def _trials(decisions: list[Decision]) -> list[int]:
    return [number for number, one in enumerate(decisions) if one.reason == "trial"]


def test_an_equally_fast_path_is_rarely_tried() -> None:
    """While its own path is as fast, the other is tried at doubling distances."""
    storage = _Storage(PathPolicy(small_size=_SMALL), direct=1e9, uncached=1.2e9)
    assert _trials(storage.run(4000)) == [512, 1537, 3586]


def test_moves_to_the_faster_path() -> None:
    """Three trials that are a quarter faster change the path and the reason."""
    storage = _Storage(PathPolicy(small_size=_SMALL), direct=1e9, uncached=2e9)
    decisions = storage.run(560)
    assert _trials(decisions) == [512, 529, 546]
    assert {one.path for one in decisions[:512]} == {IoPath.DIRECT}
    assert {one.path for one in decisions[547:]} == {IoPath.UNCACHED}
    assert decisions[547].reason == "large, faster here"


def test_one_lucky_trial_changes_nothing() -> None:
    """A trial that wins is repeated soon; if that one loses, the path stays."""
    policy = PathPolicy(small_size=_SMALL)
    storage = _Storage(policy, direct=1e9, uncached=5e9)
    assert _trials(storage.run(513)) == [512]
    storage.rates["uncached"] = 0.5e9
    decisions = storage.run(100)
    assert _trials(decisions) == [16]
    assert decisions[17].path == IoPath.DIRECT


def test_a_short_stall_changes_nothing() -> None:
    """A trial wins just after a stall of the own path, which has recovered by the next one."""
    storage = _Storage(PathPolicy(small_size=_SMALL), direct=2e9, uncached=1.5e9)
    storage.run(20)
    storage.rates["direct"] = 0.1e9
    assert _trials(storage.run(4)) == [3]
    storage.rates["direct"] = 2e9
    decisions = storage.run(200)
    assert {one.path for one in decisions if one.reason != "trial"} == {IoPath.DIRECT}
    assert len(_trials(decisions)) <= 2


def test_leaves_a_path_that_becomes_slow_and_returns() -> None:
    """A path that falls has another tried at each halving and is left for it; it is tried again
    later, and taken again when it has recovered."""
    storage = _Storage(PathPolicy(small_size=_SMALL), direct=2e9, uncached=1e9)
    assert {one.path for one in storage.run(20)} == {IoPath.DIRECT}
    storage.rates["direct"] = 0.1e9
    fallen = storage.run(60)
    assert fallen[-1].path == IoPath.UNCACHED
    assert _trials(fallen) == [3, 7, 12, 25, 58]  # three wins, and one trial back
    assert {one.path for one in fallen[26:58]} == {IoPath.UNCACHED}
    storage.rates["direct"] = 2e9
    recovered = storage.run(300)
    assert recovered[-1].path == IoPath.DIRECT
    assert recovered[-1].reason == "large, staged"


def test_a_slow_path_stays_if_no_other_is_faster() -> None:
    """When all paths become slow, one trial at each halving shows it, and no more follow."""
    storage = _Storage(PathPolicy(small_size=_SMALL), direct=2e9, uncached=1e9)
    storage.run(20)
    storage.rates.update(direct=0.1e9, uncached=0.1e9)
    assert _trials(storage.run(100)) == [3, 7, 12, 25]
    assert storage.run(1)[0].path == IoPath.DIRECT


def test_small_operations_are_not_learned() -> None:
    """The rate of a few KiB, or of an operation that took no time, is ignored."""
    policy = PathPolicy(small_size=_SMALL)
    for _ in range(200):
        policy.learn(IoPath.DIRECT, 4096, 10.0)
        policy.learn(IoPath.DIRECT, _BLOCK, 0.0)
        policy.learn(IoPath.BUFFERED, _BLOCK, 1e-6)
    assert policy.choose(_LARGE).path == IoPath.DIRECT
    assert policy.choose(_LARGE).reason == "large, staged"


def test_a_single_path_is_never_tried_against() -> None:
    """With a single path past the page cache there are no trials, even if it is slow."""
    policy = PathPolicy((IoPath.DIRECT, IoPath.BUFFERED), small_size=_SMALL)
    storage = _Storage(policy, direct=2e9)
    storage.run(50)
    storage.rates["direct"] = 0.01e9
    assert _trials(storage.run(500)) == []
