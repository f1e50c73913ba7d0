"""A workload of a few hundred KiB, and an idle device."""

from __future__ import annotations

from pathlib import Path

import pytest

from iobench import workloads
from iobench.bench.axes import Variant
from iobench.bench.contenders.base import Contender
from iobench.bench.data.replay import Replay
from iobench.bench.plan import Plan
from iobench.bench.processes.job import Job
from iobench.bench.ranks.group import Executor
from iobench.bench.ranks.members import Members
from iobench.bench.ranks.setup import Setup, setup_of, show_token
from iobench.bench.targets.base import OpenTarget, Scratch
from iobench.bench.trial import Trial
from iobench.environment import DeviceCounters
from iobench.results.records import WorldFacts
from iobench.units import MIB
from iobench.workloads import Workload

_TINY = """\
schema: iobench.workload/1
description: "two layers"
model:
  name: tiny
  family: llama
  arch: {vocab_size: 128, hidden_size: 64, num_layers: 2, num_heads: 4, ffn_hidden_size: 96}
layout: {id: hf-trainer, world_size: 2}
"""


@pytest.fixture
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    """Two layers of a llama under the HF Trainer: raw, safetensors and torch files."""
    return tiny_workload(tmp_path_factory)


def tiny_workload(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    """The content of `tiny`, for fixtures with a longer life."""
    return workloads.load(tiny_file(tmp_path_factory))


def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of `tiny`, for other processes."""
    path = tmp_path_factory.mktemp("workload") / "tiny.yaml"
    path.write_text(_TINY)
    return path


class IdleMonitor:
    """A DeviceMonitor without a device."""

    files = ()

    def read(self) -> DeviceCounters | None:
        return None


@pytest.fixture
def idle() -> IdleMonitor:
    """A monitor without a device."""
    return IdleMonitor()


@pytest.fixture(autouse=True)
def _no_dropping(monkeypatch: pytest.MonkeyPatch, tmp_path_factory) -> None:
    """The tests do not drop the page cache of the whole machine."""
    nowhere: Path = tmp_path_factory.mktemp("proc") / "drop_caches"
    monkeypatch.setattr("iobench.bench.targets.cold._DROP_CACHES", str(nowhere))


def make_trial(contender: Contender, tiny: Workload, directory: Path, idle: IdleMonitor) -> Trial:
    """A trial of one contender in this process, on 1 MiB of memory."""
    files = tuple(tiny.files())
    job = Job(contenders=(contender,), files=(files,), pool_bytes=MIB, seed=1)
    return Trial(
        run_id="0" * 16,
        repetition=0,
        order=0,
        variant=Variant(contender=contender),
        contender=0,
        shape=0,
        files=(files,),
        executor=Executor(job),
        target=OpenTarget.at(Scratch(location=str(directory)), idle),
    )


def world_facts(size: int, local: int | None = None) -> WorldFacts:
    """Ranks of a launcher, `local` on each node; None for one node."""
    return WorldFacts(
        launcher="none",
        size=size,
        nodes=-(-size // (local or size)),
        hosts=("here",) * size,
        node=tuple(rank // (local or size) for rank in range(size)),
        interface=None,
        restored_from=tuple(range(size)),
        clock_offset_s=(0.0,) * size,
        clock_error_s=(0.0,) * size,
    )


def local_setup(plan: Plan, scratch: Path | None = None) -> Setup:
    """The set-up of a run's processes on this machine, whose only target has this `scratch`."""
    size = plan.axes.most_jobs
    members = Members(facts=world_facts(size), machines=["this"] * size)
    places = [str(scratch)] if scratch else []
    return setup_of(plan, members, places, places, show_token(places))


def replay_of(trial: Trial) -> Replay:
    """The replay of the trial that `make_trial` returns."""
    return trial.executor.job.replays[0]
