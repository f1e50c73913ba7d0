"""What a budget leaves of a search: no more bytes than allowed, no refusal that is not needed."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from support.simulated_storage import SimulatedStorage, normal, space_of_writers, worlds

from iobench.errors import UsageError
from iobench.tune.budget import SMALLER, Budget, Cost, Planner, Search, TuningSizes, plan
from iobench.tune.outcome import Outcome
from iobench.units import GIB, MIB, parse_size

_SPACE = space_of_writers()
_ODD = 1_000_003  # bytes: no size of a checkpoint is a multiple of it


def sizes(size: int | None) -> TuningSizes:
    """Up to 1 GiB, or exactly `size`."""
    return TuningSizes(largest=size or GIB, fixed=size is not None, fits=lambda one: one >= MIB)


def once(size: int, verify: bool) -> int:
    return size


def stalls(size: int, verify: bool) -> int:
    return (5 + verify) * size


def budgets(most: int, count: int) -> list[int]:
    """Budgets from 16 MiB to `most`, each larger than the one before by the same factor."""
    factor = (most / (16 * MIB)) ** (1 / count)
    return [int(16 * MIB * factor**n) + n * _ODD for n in range(count + 1)]


def rank(search: Search) -> tuple[bool, int, int, int]:
    """Larger for a search with more writers, then for one with more of everything else."""
    return search.raced, search.contenders, search.rounds, search.size_bytes


@pytest.mark.parametrize("written_bytes", [once, stalls])
@pytest.mark.parametrize("size", [None, 16 * MIB, 300 * MIB, 2 * GIB, 16 * GIB])
def test_a_smaller_budget_has_a_smaller_search(
    size: int | None, written_bytes: Callable[[int, bool], int]
) -> None:
    """From the least that is possible on, none is refused. Its parts never exceed it."""
    planner = Planner.of_bytes(_SPACE, sizes(size), written_bytes)
    least = planner.least().written_bytes
    smallest = size or 16 * MIB
    probe = min(64 * MIB, smallest // 4)
    assert least == 2 * (
        written_bytes(smallest, True)
        + 4 * written_bytes(smallest, False)
        + written_bytes(probe, False)
    )
    found = []
    for max_bytes in sorted({least, *budgets(20 * least * planner.sizes.largest // smallest, 150)}):
        if max_bytes < least:
            with pytest.raises(UsageError, match="--max-bytes is too small") as refused:
                plan(_SPACE, sizes(size), written_bytes, max_bytes)
            assert named(str(refused.value)) == least
        else:
            full, search = plan(_SPACE, sizes(size), written_bytes, max_bytes)
            assert search.reserve.written_bytes <= max_bytes
            assert bool([*search.less_than(full)]) is (rank(search) < rank(full))
            found.append(search)
    ranks = [rank(one) for one in found]
    assert ranks == sorted(ranks)
    assert found[0].contenders == 2
    assert found[-1] == replace(full, reserve=found[-1].reserve)
    assert len(set(ranks)) > 5


def named(message: str) -> int:
    """Return the budget that an error asks for."""
    return parse_size(re.findall(r"at least (\S+)", message)[0])


@pytest.mark.parametrize("size", [None, 2 * GIB])
@pytest.mark.parametrize("max_bytes", budgets(130 * GIB, 12))
def test_every_budget_above_the_least_has_an_answer(size: int | None, max_bytes: int) -> None:
    """It is kept to the byte. Writers that it left out are named, and nothing is decided then."""
    storage = worlds(0.02)["steady"].storage(1)
    least = Planner.of_bytes(_SPACE, sizes(size), once).least().written_bytes
    if max_bytes < least:
        with pytest.raises(UsageError, match="--max-bytes is too small"):
            run(storage, size, Budget(max_bytes=max_bytes))
        assert storage.asked == []
        return
    outcome = run(storage, size, Budget(max_bytes=max_bytes))
    assert outcome.race.budget.written_bytes <= max_bytes
    assert sum(step.size_bytes for _, step in storage.asked) == outcome.race.budget.written_bytes
    check_words(outcome)


@pytest.mark.parametrize("size", [None, GIB])
@pytest.mark.parametrize("max_s", [8, 12, 20, 60, 300])
def test_every_time_above_the_least_has_an_answer(size: int | None, max_s: float) -> None:
    """Its limit is exceeded by what the trials took longer than expected, at most."""
    storage = SimulatedStorage(seed=1, noise=normal(0.02))
    if size and max_s < 20:
        words = "--max-time is too small to compare hybrid with one .*at least about"
        with pytest.raises(UsageError, match=words):
            run(storage, size, Budget(max_s=max_s, max_bytes=400 * GIB))
        assert {step.phase for _, step in storage.asked} <= {"probe"}
        return
    outcome = run(storage, size, Budget(max_s=max_s, max_bytes=400 * GIB))
    assert outcome.race.budget.spent_s < max_s + 3
    check_words(outcome)


def check_words(outcome: Outcome) -> None:
    """One note says what was left out, if anything was."""
    notes = [one for one in outcome.reasons() if one.startswith(SMALLER)]
    raced = {name for name, one in outcome.race.trials.items() if one.candidate.well_known}
    untried = [one.label for one in outcome.space.known if one.label not in raced]
    if outcome.left_out or untried or outcome.size_bytes < GIB:
        (said,) = notes
        words = re.split(r"[ ,;]+", said)
        assert {*outcome.left_out, *untried} <= set(words)
    else:
        assert len(notes) <= 1
    if outcome.left_out:
        assert not outcome.decided
        doubts = [one for one in outcome.reasons() if one.startswith("not decided")]
        assert any(", ".join(outcome.left_out) in one for one in doubts)


def run(storage: SimulatedStorage, size: int | None, budget: Budget) -> Outcome:
    outcome: Outcome = storage.tuner(_SPACE, budget=budget, sizes=sizes(size)).run()
    return outcome


def test_a_full_search_says_nothing() -> None:
    """With enough of both there is no note."""
    storage = SimulatedStorage(seed=1, noise=normal(0.02))
    outcome = run(storage, 64 * MIB, Budget(max_s=3600, max_bytes=400 * GIB))
    assert not [one for one in outcome.reasons() if one.startswith(SMALLER)]
    assert outcome.left_out == []


def test_the_slowest_writers_are_left_out_first() -> None:
    """The default stays however slow it is."""

    def cost(names: Sequence[str], size: int, verify: bool) -> Cost:
        return Cost(time_s=0.0, written_bytes=len(names) * size)

    probed = ["uring", "odirect", "buffered", "hybrid"]
    planner = Planner.of_rates(_SPACE, sizes(GIB), probed, cost)
    assert planner.families == ["hybrid", "uring", "odirect", "buffered"]
