"""The rules of a published benchmark: what a run did not keep of them, by its record alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from iobench.bench.judging.rules import RULES, find_rules, rules_kept
from iobench.environment import Machine
from iobench.environment.memory import MachineMemory
from iobench.errors import UnknownNameError
from iobench.results import Cold, ResultFile, Run, Sample, read

EXAMPLE: ResultFile = read(Path(__file__).parents[1] / "results" / "example.jsonl")
SAVE = next(one for one in EXAMPLE.samples if one.operation == "save")
RESTORE = next(one for one in EXAMPLE.samples if one.operation == "restore")
SIZE = SAVE.bytes
COLD = Cold(resident_bytes=0, resident_fraction=0.0, method="mincore", dropped_caches=False)


def run_of(name: str = "mlperf-8b", jobs: int = 8, full: int = SIZE, memory: int = SIZE) -> Run:
    return replace(
        EXAMPLE.run,
        plan={"rules": "mlperf", "numjobs": [jobs]},
        workload=replace(EXAMPLE.run.workload, name=name, bytes=SIZE, full_bytes=full),
        environment=replace(
            EXAMPLE.run.environment, machine=Machine(memory=MachineMemory(total_bytes=memory))
        ),
    )


def samples(saves: int = 10, restores: int = 10, cold: Cold | None = COLD) -> list[Sample]:
    return [SAVE] * saves + [replace(RESTORE, cold=cold)] * restores


def not_kept(run: Run, taken: Sequence[Sample]) -> tuple[str, ...]:
    found = rules_kept(run, taken)
    assert found is not None
    assert found.title == "MLPerf Storage v3.0, checkpointing"
    return found.not_kept


def test_a_run_that_keeps_all() -> None:
    assert not_kept(run_of(), samples()) == ()
    assert rules_kept(EXAMPLE.run, EXAMPLE.samples) is None


@pytest.mark.parametrize(
    ("run", "taken", "expected"),
    [
        (run_of("llama7b"), samples(), "the workload is llama7b, not mlperf-8b, mlperf-70b, "),
        (run_of(full=2 * SIZE), samples(), " of each process"),
        (run_of("mlperf-70b"), samples(), "8 of 64 processes"),
        (run_of("llama7b", jobs=4), samples(), "a node has 4, and must have more than 4 processes"),
        (run_of(), samples(saves=9), "9 of 10 saves"),
        (run_of(), samples(restores=3), "3 of 10 restores"),
        (run_of(), samples()[::-1], "not all saves were before all restores"),
        (
            run_of(memory=4 * SIZE),
            samples(cold=replace(COLD, resident_fraction=0.5)),
            "neither a cleared cache nor data above 3 times the memory",
        ),
    ],
)
def test_what_is_not_kept(run: Run, taken: list[Sample], expected: str) -> None:
    found = not_kept(run, taken)
    assert any(expected in one for one in found), found


def test_more_data_than_three_memories_need_no_cleared_cache() -> None:
    warm = samples(cold=replace(COLD, resident_fraction=0.5))
    assert not_kept(run_of(memory=3 * SIZE), warm) == ()


def test_names() -> None:
    assert find_rules("mlperf") is RULES["mlperf"]
    assert RULES["mlperf"].default == "mlperf-8b"
    with pytest.raises(UnknownNameError, match="did you mean 'mlperf'"):
        find_rules("mlpref")
