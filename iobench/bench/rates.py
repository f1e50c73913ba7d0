"""The rates of short probes of each contender, and the duration of a run computed from them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from iobench.bench.axes import Variant
from iobench.bench.contenders.base import Contender
from iobench.bench.data.replay import Replay
from iobench.bench.data.subset import share_of
from iobench.bench.fio import JOBS
from iobench.bench.targets.base import Location, Target
from iobench.units import GIB, MIB
from iobench.workloads import FileSpec, TensorSpec
from iobench.writers.transfer import Transfer

_PROBE_BYTES, _REMOTE_PROBE_BYTES = 256 * MIB, 32 * MIB
_REST_S = 0.25  # before each sample: settle, removing files, starting fio
_OWN_S_PER_BYTE = 0.3 / GIB  # untimed work: renewing the pool, digests, verification


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates of short probes, in bytes per second: one for each save and restore of a repetition.

    `saved` and `restored` are the bytes that each of them moves, in units of the bytes of one
    process. `best` has the highest save and restore rate in each target that fio may measure.
    """

    save: tuple[float, ...]
    restore: tuple[float, ...]
    saved: tuple[float, ...]
    restored: tuple[float, ...]
    best: tuple[tuple[float, float], ...]

    def run_s(self, size_bytes: int, *, repeat: int, ceiling: bool) -> float:
        """Return the seconds of a run with checkpoints of `size_bytes`, with its rests."""
        steps = len(self.save) + len(self.restore)
        steps += 2 * len(JOBS) * len(self.best) if ceiling else 0
        moving = size_bytes * self.run_s_per_byte(repeat=repeat, ceiling=ceiling)
        return moving + repeat * steps * _REST_S

    def affordable_bytes(self, seconds: float, *, repeat: int, ceiling: bool) -> int:
        """Return the size for which `run_s` is about `seconds`.

        Rests count for at most half of `seconds`: there is always time left to move bytes.
        """
        moving = max(seconds - self.run_s(0, repeat=repeat, ceiling=ceiling), seconds / 2)
        return int(moving / self.run_s_per_byte(repeat=repeat, ceiling=ceiling))

    def run_s_per_byte(self, *, repeat: int, ceiling: bool) -> float:
        """Return the seconds of a run per byte of one process's checkpoint."""
        per_repetition = _seconds(self.saved, self.save) + _seconds(self.restored, self.restore)
        per_repetition += _OWN_S_PER_BYTE * sum(self.saved)
        if ceiling:
            per_repetition += len(JOBS) * sum(1 / save + 1 / restore for save, restore in self.best)
        return per_repetition * repeat


def _seconds(times: Iterable[float], rates: Iterable[float]) -> float:
    return sum(each / rate for each, rate in zip(times, rates, strict=True))


def measure_rates(
    variants: Sequence[Variant],
    subsets: Sequence[float | None],
    targets: Mapping[str | None, Target],
) -> Rates:
    """Save and restore a short random file with each contender in each of its targets, once.

    For planning only. `targets` are the targets by the value that variants have in `target`.
    Assumes that a process in the background takes half of the rate.
    Assumes that several processes together reach the rate of one process, and that files of every
    shape reach the rate of this file.
    """
    probed: dict[tuple[Contender, str | None], tuple[float, float]] = {}
    best = []
    for value, target in targets.items():
        here = dict.fromkeys(one.contender for one in variants if one.target == value)
        found = _probe(list(here), target)
        probed |= {(one, value): rates for one, rates in zip(here, found, strict=True)}
        if not target.no_ceiling:
            best.append((max(save for save, _ in found), max(restore for _, restore in found)))
    restores = [(one, subset) for one in variants for subset in subsets]
    return Rates(
        save=tuple(_share(one) * probed[one.contender, one.target][0] for one in variants),
        saved=tuple(float(one.saves) for one in variants),
        restore=tuple(_share(one) * probed[one.contender, one.target][1] for one, _ in restores),
        restored=tuple(one.numjobs * share_of(subset) for one, subset in restores),
        best=tuple(best),
    )


def _share(variant: Variant) -> float:
    return 0.5 if variant.background else 1.0


def _probe(contenders: Sequence[Contender], target: Target) -> list[tuple[float, float]]:
    """Return the rates of a save and a restore of each contender in one target."""
    found = []
    free = target.free_bytes()
    size = _REMOTE_PROBE_BYTES if free is None else min(_PROBE_BYTES, free)
    size = size or _PROBE_BYTES  # no free space: no contender stores anything
    with target.scratch() as scratch:
        for one in contenders:
            replay, where = _short_replay(size), scratch.locate("probe")
            replay.prepare()
            found.append((_rate(one.save, replay, where), _rate(one.restore, replay, where)))
            scratch.remove("probe")
    return found


def _short_replay(size_bytes: int) -> Replay:
    blob = TensorSpec(name="blob", dtype="uint8", shape=(size_bytes,))
    file = FileSpec(path="file", format="raw", tensors=(blob,), size_bytes=size_bytes, exact=True)
    replay = Replay([file], pool_bytes=size_bytes, seed=0)
    assert replay.size_bytes() == size_bytes
    return replay


def _rate(
    operation: Callable[[Replay, Location], Transfer], replay: Replay, where: Location
) -> float:
    """Return the bytes per second of one save or restore."""
    began = time.perf_counter()
    operation(replay, where)
    return replay.size_bytes() / (time.perf_counter() - began)
