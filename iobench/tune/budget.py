"""Budget: the seconds and written bytes that a tuning may spend, and their shares by phase."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from iobench.errors import OptionError, UsageError
from iobench.stats.comparison import LEAST_SAMPLES
from iobench.tune.objective import Measurement
from iobench.tune.space import Space
from iobench.units import GIB, MIB, format_size, format_size_exact

DEFAULT_SECONDS, DEFAULT_BYTES = 180.0, 80 * GIB
SLACK = 1.25
"""Factor by which trials of the confirmation are expected to last longer than earlier trials."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds and written bytes: the expected cost of trials, or a part of the budget."""

    time_s: float
    written_bytes: int

    def plus(self, other: Cost, *, times: int = 1) -> Cost:
        """Return the cost of this and `times` times `other`."""
        return Cost(
            time_s=self.time_s + times * other.time_s,
            written_bytes=self.written_bytes + times * other.written_bytes,
        )

    def covers(self, other: Cost, *, times: int = 1) -> bool:
        """Return whether this is enough for `times` times `other`."""
        return (
            times * other.written_bytes <= self.written_bytes
            and times * other.time_s <= self.time_s
        )


NOTHING = Cost(time_s=0.0, written_bytes=0)


@dataclass(kw_only=True)
class Budget:
    """The limits of a tuning and what it has spent. A trial begins only if it is expected to fit.

    The bytes of a trial are known before it begins, so `max_bytes` is never exceeded. The last
    trial may be slower than expected, so `max_s` may be exceeded by that much. `set_aside` divides
    the rest in two: the confirmation's `reserve` and the race's `share`. `left` is the fraction of
    the race's share that is left.
    """

    max_s: float = DEFAULT_SECONDS
    max_bytes: int = DEFAULT_BYTES
    spent_s: float = field(default=0.0, init=False)
    written_bytes: int = field(default=0, init=False)
    reserve: Cost = field(default=NOTHING, init=False)
    share: Cost = field(init=False)

    def __post_init__(self) -> None:
        if not self.max_s > 0:
            raise OptionError(f"--max-time must be above zero, and is {self.max_s:g}s")
        if not self.max_bytes > 0:
            size = format_size_exact(self.max_bytes)
            raise OptionError(f"--max-bytes must be above zero, and is {size}")
        self.set_aside(self.reserve)

    def spend(self, one: Measurement) -> None:
        """Add the time and the written bytes of a trial."""
        self.spent_s += one.spent_s
        self.written_bytes += one.written_bytes

    @property
    def left_cost(self) -> Cost:
        """Bytes and seconds left; the latter negative after trials slower than expected."""
        return Cost(
            time_s=self.max_s - self.spent_s, written_bytes=self.max_bytes - self.written_bytes
        )

    def set_aside(self, reserve: Cost) -> None:
        """Keep `reserve` for the confirmation; the rest of what is left is the race's share."""
        self.reserve, self.share = reserve, self.left_cost.plus(reserve, times=-1)

    def part(self, cost: Cost) -> float:
        """Return `cost` as a fraction of the race's share: of seconds or bytes, the larger."""
        return max(cost.written_bytes / self.share.written_bytes, cost.time_s / self.share.time_s)

    @property
    def left(self) -> float:
        """The fraction of the race's share that is left: of seconds or bytes, the smaller."""
        left = self.left_cost.plus(self.reserve, times=-1)
        return min(left.written_bytes / self.share.written_bytes, left.time_s / self.share.time_s)

    def races(self, cost: Cost, *, until: float) -> bool:
        """Return whether a round of the race may begin: it must leave `until` of the share."""
        return self.left - self.part(cost) >= until

    def affordable(self, each: Cost, *, rounds: int, until: float) -> int:
        """Return how many settings can run `rounds` rounds and leave `until` of the share."""
        return max(0, int((self.left - until) / (rounds * self.part(each))))

    def confirms(self, cost: Cost, *, enough: bool) -> bool:
        """Return whether a round of the confirmation may begin.

        Its bytes must always fit. Its time must fit once there are `enough` samples. Before that,
        the time may be exceeded by up to the reserve's seconds, so that a tuning has an answer even
        where the storage became slower.
        """
        left = self.left_cost
        if cost.written_bytes > left.written_bytes or left.time_s < -self.reserve.time_s:
            return False
        return not enough or left.time_s >= SLACK * cost.time_s


_PROBE = 64 * MIB
_LEAST = 16 * MIB
_PART = 8  # the race's checkpoints are this part of those of the confirmation


@dataclass(frozen=True, kw_only=True)
class TuningSizes:
    """The sizes in bytes that a tuning may request.

    Those of the confirmation are `candidates`; with `fixed` there is only one. `fits` returns
    whether the workload can be scaled to a size.
    """

    largest: int
    fixed: bool
    fits: Callable[[int], bool]

    def candidates(self) -> Iterator[int]:
        """Yield `largest`, then smaller sizes, each half of the one before."""
        size = self.largest
        while self.fits(size):
            yield size
            if self.fixed or size // 2 < _LEAST:
                return
            size //= 2

    def probe_bytes(self, confirm: int) -> int:
        """Return the size of a probe before a confirmation at `confirm`."""
        return self._fitting(min(_PROBE, confirm // 4), confirm)

    def race_bytes(self, confirm: int, *, few: bool = False) -> int:
        """Return the size of a race before a confirmation at `confirm`; twice it for a few."""
        part = _PART // 2 if few else _PART
        return self._fitting(max(self.probe_bytes(confirm), confirm // part), confirm)

    def _fitting(self, size: int, most: int) -> int:
        """Return `size`, doubled until the workload fits; `most` at most."""
        while size < most:
            if self.fits(size):
                return size
            size *= 2
        if not self.fits(most):
            raise UsageError(f"the workload cannot be scaled to {most} bytes")
        return most


ROUNDS = 2
"""Rounds of a rung: the fewest in which a setting can be shown worse."""
LOOK_ROUNDS = 2
"""Rounds of the first look, with all contenders. Clearly worse ones are eliminated after it."""
LAST_ROUNDS = 2
"""Rounds at the end, with the best setting of every family once more, eliminated or not."""

SMALLER = "a smaller search, for --max-time or --max-bytes: "
"""Begins the note that says what a budget has left out."""

_STAYING = 4
_BESIDE = 2  # contenders besides one of each family: runner-up and the best known setting
_RACE_ROUNDS = 10  # of the known settings: with less the settings near the best are not all raced
_Costs = Callable[[Sequence[str], int, bool], Cost]


@dataclass(frozen=True, kw_only=True)
class Search:
    """A search: the size of its checkpoints, and how many settings are confirmed.

    `contenders` take part in the first look, the default setting among them. Unless the order is
    that of the probes, they are `raced` first: the race affords `rounds` of the known settings.
    `reserve` is the cost of the confirmation.
    """

    size_bytes: int
    contenders: int
    raced: bool = True
    rounds: int = ROUNDS
    reserve: Cost = NOTHING

    @property
    def staying(self) -> int:
        """How many contenders run on after the first look."""
        return min(_STAYING, self.contenders)

    def less_than(self, full: Search) -> Iterator[str]:
        """Yield in words what this search has less of than a `full` one."""
        if self.size_bytes < full.size_bytes:
            size, most = format_size(self.size_bytes), format_size(full.size_bytes)
            yield f"checkpoints of {size} instead of {most}"
        if not self.raced:
            yield "no race, the order is that of short probes"
        if self.contenders < full.contenders:
            yield f"{self.contenders} settings confirmed instead of {full.contenders}"


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Finds the largest search that a budget affords.

    `families` are the best settings of each writer, the default first and then by speed. `raced`
    are the settings that the race begins with. `cost` returns the expected cost of one trial of
    each of some settings, verified or not. `most` is the number of settings that exist, and
    `unprobed` that of the settings that are still to be probed.
    """

    sizes: TuningSizes
    families: Sequence[str]
    raced: Sequence[str]
    most: int
    cost: _Costs
    unprobed: int = 0

    @classmethod
    def of_bytes(
        cls, space: Space, sizes: TuningSizes, written_bytes: Callable[[int, bool], int]
    ) -> Planner:
        """Return the planner before anything was measured: trials take bytes and no time."""

        def cost(names: Sequence[str], size: int, verify: bool) -> Cost:
            return Cost(time_s=0.0, written_bytes=len(names) * written_bytes(size, verify))

        known = [one.label for one in space.known]
        return replace(cls.of_rates(space, sizes, known, cost), unprobed=len(known))

    @classmethod
    def of_rates(
        cls, space: Space, sizes: TuningSizes, probed: Sequence[str], cost: _Costs
    ) -> Planner:
        """Return the planner for the known settings `probed`, which work, the fastest first."""
        writers = {one.label: one.writer for one in space.known}
        best: dict[str, str] = {}
        for name in sorted(probed, key=lambda one: one != space.baseline.label):
            best.setdefault(writers[name], name)
        families = list(best.values())
        return cls(sizes=sizes, families=families, raced=probed, most=space.size, cost=cost)

    def full(self) -> Search:
        """Return the search of a budget without limits."""
        return next(self._searches())

    def largest(self, left: Cost) -> Search | None:
        """Return the largest search that `left` affords; None if not even one comparison fits.

        Sizes are reduced before the number of writers: one that is left out may be the best, and
        then nothing is decided.
        """
        for search in self._searches():
            for size in self.sizes.candidates():
                found = replace(search, size_bytes=size)
                found = replace(found, reserve=self._reserve(found))
                if self._fits(found, left):
                    return found
        return None

    def least(self) -> Cost:
        """Return the cost of the smallest search: the default and one other, five rounds each."""
        *_, search = self._searches()
        *_, size = self.sizes.candidates()
        search = replace(search, size_bytes=size)
        probes = self._probes(search)
        reserve = self._reserve(search)
        return replace(reserve, written_bytes=reserve.written_bytes + probes)

    def _searches(self) -> Iterator[Search]:
        """Yield searches of one size, the largest first."""
        families, size = len(self.families), self.sizes.largest
        pair = min(2, self.most)
        most = min(families + _BESIDE, self.most)
        yield Search(size_bytes=size, contenders=most, rounds=_RACE_ROUNDS)
        for contenders in range(max(pair, families), 1, -1):
            yield Search(size_bytes=size, contenders=contenders)
        yield Search(size_bytes=size, contenders=pair, raced=False)

    def _reserve(self, search: Search) -> Cost:
        size, count = search.size_bytes, search.contenders
        first, later = (self.cost(self.families[:1], size, v).written_bytes for v in (True, False))
        kept = self.families[:count]
        if not search.raced:
            both = (*kept, *kept)[:count]
            return Cost(
                time_s=LEAST_SAMPLES * self.cost(both, size, False).time_s,
                written_bytes=count * (first + (LEAST_SAMPLES - 1) * later),
            )
        # One round more than counted, because the first one also restores every checkpoint.
        staying = [kept[n % len(kept)] for n in range(search.staying)]
        rounds_s = (LEAST_SAMPLES - LOOK_ROUNDS + 1) * self.cost(staying, size, False).time_s
        rounds_s += (LOOK_ROUNDS + LAST_ROUNDS) * self.cost(kept, size, False).time_s
        return Cost(
            time_s=SLACK * rounds_s,
            written_bytes=count * (first + (LOOK_ROUNDS - 1) * later)
            + search.staying * LEAST_SAMPLES * later
            + LAST_ROUNDS * len(kept) * later,
        )

    def _fits(self, search: Search, left: Cost) -> bool:
        probes = Cost(time_s=0.0, written_bytes=self._probes(search))
        share = left.plus(search.reserve, times=-1).plus(probes, times=-1)
        if not search.raced:
            return share.covers(NOTHING)
        size = self.sizes.race_bytes(search.size_bytes)
        return share.covers(self.cost(self.raced, size, False), times=search.rounds)

    def _probes(self, search: Search) -> int:
        count = self.unprobed if search.raced else min(2, self.unprobed)
        size = self.sizes.probe_bytes(search.size_bytes)
        return count * self.cost(self.families[:1], size, False).written_bytes


def plan(
    space: Space,
    sizes: TuningSizes,
    written_bytes: Callable[[int, bool], int],
    max_bytes: int,
) -> tuple[Search, Search]:
    """Return the full search, and the largest whose probes, race and confirmation fit `max_bytes`.

    Raises UsageError where not even the default and one other setting can be compared.
    """
    planner = Planner.of_bytes(space, sizes, written_bytes)
    found = planner.largest(Cost(time_s=math.inf, written_bytes=max_bytes))
    if found is None:
        whole_mib = -(-planner.least().written_bytes // MIB) * MIB
        least = format_size_exact(whole_mib)
        raise too_small("--max-bytes", least, space, sizes)
    return planner.full(), found


def too_small(option: str, least: str, space: Space, sizes: TuningSizes) -> UsageError:
    """Return the error for a budget that does not suffice for one comparison."""
    smaller = " or choose a smaller --size" if sizes.fixed else ""
    return UsageError(
        f"{option} is too small to compare {space.baseline.label} with one other setting: give at "
        f"least {least}{smaller}"
    )
