"""The content of a plan, and what it refuses before anything is written."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from iobench.bench import plan as module
from iobench.bench import planning
from iobench.bench.axes import Axes
from iobench.bench.choose import choose
from iobench.bench.contenders.base import Contender
from iobench.bench.data.replay import Replay
from iobench.bench.fio import JOBS
from iobench.bench.judging.repeat import Repeat
from iobench.bench.judging.verdict import repeats_every
from iobench.bench.plan import DEFAULT_SECONDS, Plan
from iobench.bench.planning import Rates, expected_line, make_plan, measure_rates, plan_lines
from iobench.bench.targets.directory import DirectoryTarget
from iobench.errors import (
    TargetError,
    UsageError,
)
from iobench.units import GIB, MIB, format_size
from iobench.workloads import Workload

from .conftest import local_setup

if TYPE_CHECKING:
    from iobench.results import Run

RATES = Rates(steps=4 + 2 * len(JOBS), s_per_byte=6 / GIB, saved=2, save_bytes_per_s=2.0 * GIB)


@pytest.fixture(autouse=True)
def fio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "fio_version", lambda: "3.33")


@pytest.fixture
def plan(tiny: Workload, tmp_path: Path) -> Plan:
    return Plan(
        workload=tiny,
        full_bytes=tiny.size_bytes(),
        rank=0,
        contenders=chosen("buffered,null,uncached"),
        targets=(DirectoryTarget(path=tmp_path),),
        repeat=Repeat(times=3),
        ceiling=True,
        seed=1,
    )


def chosen(text: str) -> tuple[Contender, ...]:
    return tuple(choose(text, ".")[0])


def space(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """Give every file system `free` bytes."""
    answer = SimpleNamespace(f_bavail=free // 4096, f_frsize=4096, f_bfree=0, f_blocks=10**9)
    monkeypatch.setattr(os, "statvfs", lambda _path: answer)


def make_tiny_plan(target: Path | str, **asked: Any) -> Plan:
    return make_plan(**{"workload": "llama7b", "writers": "null", "target": target} | asked)


def test_written_bytes(plan: Plan) -> None:
    """Each storing writer and each fio job writes the checkpoint once per repetition."""
    assert plan.written_bytes == 3 * plan.size_bytes * (2 + len(JOBS))
    without = dataclasses.replace(plan, ceiling=False)
    assert without.written_bytes == 3 * plan.size_bytes * 2


def test_without_fio_there_is_no_ceiling(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without fio its bytes are not in the plan, and the plan says how to install it."""
    monkeypatch.setattr(module, "fio_version", lambda: None)
    assert plan.ceiling_targets == ()
    assert plan.written_bytes == 3 * plan.size_bytes * 2
    assert plan.to_dict()["ceiling_jobs"] == []
    assert "apt-get install fio" in "\n".join(plan_lines(plan))


def test_the_record_of_a_plan(plan: Plan) -> None:
    """Every file, writer and job is in it, as plain values."""
    record, files = plan.to_dict(), list(plan.listed_files())
    assert [file["path"] for file in files] == [f.path for f in plan.workload.files()]
    assert sum(file["bytes"] for file in files) == record["size_bytes"]
    assert [writer["name"] for writer in record["writers"]] == ["buffered", "null", "uncached"]
    assert record["ceiling_jobs"] == [job.name for job in JOBS]
    assert (record["scale"], record["target"]) == (None, plan.targets[0].location)


def test_free_space_keeps_a_margin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """5% and 256 MiB stay free. If less is free, nothing may be used."""
    space(monkeypatch, 100 * GIB)
    assert DirectoryTarget(path=tmp_path).free_bytes() == 95 * GIB - 256 * MIB
    space(monkeypatch, 200 * MIB)
    assert DirectoryTarget(path=tmp_path).free_bytes() == 0


def test_a_target_that_is_too_small(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte less than needed is refused, with the sizes and a remedy."""
    spare = 256 * MIB
    enough = int((plan.size_bytes + spare) / 0.95) + 8192
    space(monkeypatch, enough)
    plan.check()
    space(monkeypatch, enough - 16384)
    with pytest.raises(TargetError, match=r"does not fit.*choose a smaller --size"):
        plan.check()


def test_null_needs_no_space(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that stores nothing works on a full disk, and is probed and scaled there too."""
    space(monkeypatch, 0)
    monkeypatch.setattr(planning, "_PROBE_BYTES", MIB)
    without = dataclasses.replace(plan, contenders=chosen("null"))
    without.check()
    assert expected_line(without).startswith("expected  about ")
    monkeypatch.setattr(planning, "measure_rates", lambda _: RATES)
    assert make_tiny_plan(plan.targets[0].location).size_bytes > 0


def test_more_memory_than_there_is(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool larger than memory is refused, unless the checkpoint is small enough."""
    monkeypatch.setattr(module, "available_bytes", lambda: plan.size_bytes - 1)
    with pytest.raises(
        UsageError, match=r"data of the run take 16.00 MiB of memory.*control groups"
    ):
        plan.check()
    monkeypatch.setattr(module, "available_bytes", lambda: plan.size_bytes)
    plan.check()
    monkeypatch.setattr(module, "available_bytes", lambda: None)
    plan.check()


def _repeats(plan: Plan) -> int | None:
    """Return after how many bytes the data repeat, as the record of the plan says."""
    workload = SimpleNamespace(bytes=plan.size_bytes)
    return repeats_every(
        cast("Run", SimpleNamespace(plan=plan.to_dict(), world=None, workload=workload))
    )


def _default(directory: Path, jobs: int, **changed: Any) -> Plan:
    axes = Axes(numjobs=tuple(dict.fromkeys((1, jobs))))
    return make_tiny_plan(directory, size="64MiB", axes=axes, **changed)


@pytest.mark.parametrize("jobs", [1, 4])
def test_no_byte_of_a_checkpoint_repeats_by_default(
    jobs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process has memory for all bytes of its own checkpoint, and the record says so."""
    monkeypatch.setattr(module, "available_bytes", lambda: 8 * GIB)
    plan = _default(tmp_path, jobs)
    pool_bytes = local_setup(plan).pool_bytes
    for files in plan.files_of_jobs:
        replay = Replay(files[0], pool_bytes=pool_bytes, seed=1)
        numbers = range(replay._placement.count)
        assert {replay._placement.window(number).lap for number in numbers} == {0}
    assert _repeats(plan) is None


def test_half_of_the_memory_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then bytes repeat, and the record says after how many: the same in the next run."""
    found = set()
    for available in (76 * MIB, 79 * MIB):
        monkeypatch.setattr(module, "available_bytes", lambda available=available: available)
        plan = _default(tmp_path, 1)
        assert plan.pool_bytes <= available // 2
        found.add(_repeats(plan))
    assert found == {32 * MIB}


def test_peers_need_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they restore into new memory is left free."""
    monkeypatch.setattr(module, "available_bytes", lambda: 100 * MIB)
    plan = make_tiny_plan(tmp_path, size="64MiB", writers="buffered,peer:torch-save")
    assert 16 * MIB <= plan.pool_bytes <= 100 * MIB - plan.size_bytes


def test_a_chosen_size(tmp_path: Path) -> None:
    """Layers are dropped to reach the size, and the plan names them."""
    plan = make_tiny_plan(tmp_path, size="64MiB")
    assert 32 * MIB < plan.size_bytes <= 64 * MIB
    assert plan.full_bytes > 70 * GIB
    text = "\n".join(plan_lines(plan))
    assert "scaled" in text
    assert "--size full" in text


def test_full_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`full` is the whole workload, if it fits."""
    space(monkeypatch, 1000 * GIB)
    monkeypatch.setattr(module, "available_bytes", lambda: GIB)
    plan = make_tiny_plan(tmp_path, size="full", writers="buffered")
    assert plan.workload.scale is None
    assert plan.size_bytes == plan.full_bytes > 70 * GIB


def test_the_default_size_takes_two_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a size, the workload is scaled to the bytes that the probed rates move in the
    time."""
    space(monkeypatch, 1000 * GIB)
    monkeypatch.setattr(planning, "measure_rates", lambda _: RATES)
    plan = make_tiny_plan(tmp_path, repeat=5)
    expected_s = RATES.run_s(plan.size_bytes, 5)
    assert 0.6 * DEFAULT_SECONDS < expected_s <= DEFAULT_SECONDS  # in steps of a layer


def test_an_aa_run_writes_and_takes_once_more(plan: Plan) -> None:
    """The first contender takes part twice, and the record says so."""
    twice = replace(plan, aa=True)
    assert [one.contender.name for one in twice.variants_with_twins] == [
        "buffered",
        "null",
        "uncached",
        "buffered",
    ]
    assert twice.written_bytes == plan.written_bytes + 3 * plan.size_bytes
    assert (plan.to_dict()["aa"], twice.to_dict()["aa"]) == (False, True)


def test_rests_take_at_most_half_of_the_time() -> None:
    """Many repetitions of a small checkpoint still move some bytes."""
    size = RATES.affordable_bytes(1.0, repeat=100)
    assert size == int(0.5 / (100 * RATES.s_per_byte))


def test_the_default_size_fits_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a small disk the free space limits it."""
    space(monkeypatch, 3 * GIB)
    monkeypatch.setattr(planning, "measure_rates", lambda _: RATES)
    plan = make_tiny_plan(tmp_path, writers="buffered", repeat=1)
    assert plan.size_bytes <= DirectoryTarget(path=tmp_path).free_bytes() < 3 * GIB


def test_seconds_per_byte(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Each writer saves and restores once per repetition; each fio job is as fast as the fastest
    writer."""
    probed = [(1.0 * GIB, 4.0 * GIB), (2.0 * GIB, 2.0 * GIB)]
    monkeypatch.setattr(planning, "_probe", lambda *_: probed)
    plan = replace(plan, contenders=chosen("buffered,uncached"))
    without = measure_rates(replace(plan, ceiling=False))
    assert without.s_per_byte * GIB == pytest.approx(1 + 0.5 + 0.25 + 0.5 + 2 * 0.3)
    assert (without.steps, without.saved, without.save_bytes_per_s) == (4, 2, 2 * GIB)
    jobs = measure_rates(plan)
    assert (jobs.s_per_byte - without.s_per_byte) * GIB == pytest.approx(len(JOBS) * (0.5 + 0.25))
    assert jobs.steps == 4 + 2 * len(JOBS)


def test_rests_are_expected_too() -> None:
    """The pause before each sample counts: it is most of the time of a small run."""
    tiny = RATES.run_s(0, 3)
    assert tiny == pytest.approx(3 * (4 + 2 * len(JOBS)) * 0.25)
    assert RATES.run_s(GIB, 3) - tiny == pytest.approx(3 * RATES.s_per_byte * GIB)


def test_probing_leaves_nothing(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """The expected time comes from short probes of each writer, whose files are removed."""
    monkeypatch.setattr(planning, "_PROBE_BYTES", MIB)
    assert expected_line(plan).startswith("expected  about ")
    assert os.listdir(plan.targets[0].location) == []


def test_saves_that_follow_each_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Their bytes are known before, fio and contenders that only restore take no part. Without a
    size there are about 100 saves, and as many within the bytes."""
    monkeypatch.setattr(planning, "measure_rates", lambda _: RATES)
    often = Repeat.sustained("10min", None, "100GiB")
    made = make_tiny_plan(tmp_path, writers="buffered,peer:torch-save", repeat=often)
    assert not made.ceiling_targets
    assert made.repeat.most == 100 * GIB // made.repetition_bytes
    assert made.repeat.most == pytest.approx(100, abs=15)
    assert 0.9 * 100 * GIB < made.written_bytes <= 100 * GIB
    text = "\n".join(plan_lines(made))
    assert "saves follow each other for 10 min 0 s, without fio" in text
    assert f"{format_size(made.written_bytes)} written in all at most" in text
    assert "written, probed at 2.00 GiB/s" in expected_line(made)
    assert made.to_dict()["repeat"] is None


def test_a_contender_that_only_restores_is_left_out(tmp_path: Path) -> None:
    often = Repeat.sustained("1min", None, None)
    reader = replace_saves(chosen("buffered,null"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "choose", lambda *_: (list(reader), []))
        made = make_tiny_plan(tmp_path, size="8MiB", repeat=often)
        assert [one.name for one in made.contenders] == ["null"]
        assert made.left_out == ("buffered: only restores",)
        patch.setattr(planning, "choose", lambda *_: (list(reader[:1]), []))
        with pytest.raises(UsageError, match="nothing to measure: buffered: only restores"):
            make_tiny_plan(tmp_path, size="8MiB", repeat=often)


def replace_saves(contenders: tuple[Contender, ...]) -> tuple[Contender, ...]:
    """Let the first one only restore."""
    contenders[0].saves = False
    return contenders
