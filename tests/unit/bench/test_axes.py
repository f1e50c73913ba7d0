"""Axes: the values of their options, and the combinations that take part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from iobench.bench.axes import Axes
from iobench.bench.choose import choose, find_baseline
from iobench.bench.planning import make_plan, plan_lines
from iobench.errors import OptionError, UnknownNameError, UsageError
from iobench.units import MIB
from iobench.workloads import Workload

from .conftest import local_setup

BOTH = "odirect,peer:torch-save"


def labels(writers: str = BOTH, **asked: str) -> list[str]:
    return [one.label for one in Axes.parse(**asked).variants(choose(writers, ".")[0])]


def test_without_any_there_is_one_of_each() -> None:
    assert Axes.parse() == Axes()
    assert labels() == ["odirect", "peer:torch-save"]


def test_every_combination_takes_part() -> None:
    """Peers have a format of their own: with several serializers they take part once."""
    found = labels(serializer="safetensors,torch", granularity="same,shard=1GB", numjobs="1,4")
    assert found == [
        *(
            f"odirect serializer={serializer}{granularity}{numjobs}"
            for serializer in ("safetensors", "torch")
            for granularity in ("", " granularity=shard=1GB")
            for numjobs in ("", " numjobs=4")
        ),
        *(
            f"peer:torch-save{granularity}{numjobs}"
            for granularity in ("", " granularity=shard=1GB")
            for numjobs in ("", " numjobs=4")
        ),
    ]


def test_replicas_restore_by_our_writers_only() -> None:
    """Each mode is a row; a peer restores in each process for itself, and is left out."""
    assert labels(restore_mode="all,broadcast") == [
        "odirect restore-mode=all",
        "odirect restore-mode=broadcast",
    ]
    axes = Axes.parse(restore_mode="auto")
    (reason,) = axes.skipped(choose(BOTH, ".")[0])
    assert reason.startswith("peer:torch-save with --restore-mode")
    with pytest.raises(OptionError, match="all-gather"):
        Axes.parse(restore_mode="tree")
    with pytest.raises(UsageError, match="nothing to measure: peer:torch-save"):
        make_plan(workload="llama7b", writers="peer:torch-save", target=".", axes=axes)


def test_replicas_save_in_slices_by_our_writers_only(tmp_path: Path) -> None:
    """Each number of writers is a row, next to restore modes; a save moves the bytes once."""
    assert labels(slices="off,all,2") == [f"odirect slices={how}" for how in ("off", "all", "2")]
    assert len(labels(slices="off,all", restore_mode="all,broadcast", numjobs="2")) == 4
    axes = Axes.parse(slices="off,all", numjobs="3")
    (reason,) = axes.skipped(choose(BOTH, ".")[0])
    assert reason.startswith("peer:torch-save with --slices")
    plan = plan_of("llama7b", tmp_path, slices="off,all", numjobs="3")
    assert plan.all_bytes == plan.size_bytes
    assert plan.written_bytes == plan.repeat.times * plan.size_bytes * (2 + _jobs(plan))
    assert local_setup(plan).sliced
    assert "replicas of rank 0, which save its files once" in "\n".join(plan_lines(plan))
    both = make_plan(
        workload="llama7b", writers=BOTH, target=tmp_path, size="64MiB", axes=plan.axes
    )
    assert not any(one.is_peer or one.fresh for one in both.contenders)
    with pytest.raises(OptionError, match="a node has 3 processes at most"):
        plan_of("llama7b", tmp_path, slices="4", numjobs="3")


def test_a_background_is_a_row_of_its_own(tmp_path: Path) -> None:
    """Next to the same contender alone, which it is compared with. `null` has nothing to share."""
    assert labels("odirect,null", background="none,restore") == [
        "odirect",
        "odirect background=restore",
        "null",
    ]
    axes = Axes.parse(background="restore", serializer="safetensors,torch")
    assert axes.skipped(choose("null", ".")[0]) == [
        "null with --background restore: it stores nothing"
    ]
    assert (Axes().earlier, axes.earlier) == (0, 2)
    plan = plan_of("llama7b", tmp_path, background="none,restore")
    assert plan.to_dict()["baseline"] == {"background": None, "label": "no background"}
    alone = plan_of("llama7b", tmp_path)
    per_save = plan.size_bytes * plan.repeat.times
    assert plan.written_bytes == alone.written_bytes + per_save + plan.size_bytes
    assert "background  another process restores" in "\n".join(plan_lines(plan))
    assert "background  " not in "\n".join(plan_lines(alone))


def test_skipped_combinations_are_listed(tmp_path: Path) -> None:
    plan = make_plan(
        workload="llama7b",
        writers=BOTH,
        target=tmp_path,
        size="64MiB",
        axes=Axes.parse(serializer="raw,torch"),
    )
    assert (
        "\n".join(plan_lines(plan)).count("left out  peer:torch-save with --serializer torch") == 1
    )


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        ({"serializer": "torch,pickle"}, UnknownNameError, "unknown serializer 'pickle'"),
        ({"serializer": "torch,torch"}, OptionError, "torch is given twice"),
        ({"granularity": "blob,layers"}, UnknownNameError, "did you mean 'layer'"),
        ({"granularity": "blob=3"}, OptionError, "only shard takes a size"),
        ({"granularity": "shard=0"}, OptionError, "must have at least 1 byte"),
        ({"granularity": "shard=much"}, OptionError, "not a size"),
        ({"granularity": "blob,,layer"}, OptionError, "a value is missing between the commas"),
        ({"restore_as": "same,subset=0.1"}, OptionError, "subset=0.1: must be same, or tp=RANKS"),
        ({"slices": "on"}, OptionError, "--slices on: must be off, all, or how many ranks"),
        ({"slices": "0"}, OptionError, "--slices 0: must be off"),
        ({"background": "save"}, OptionError, "--background save: must be none or restore"),
        ({"numjobs": "0"}, OptionError, "must be a number from 1 to 256"),
        ({"numjobs": "2,x"}, OptionError, "--numjobs x: must be a number"),
        ({"numjobs": ""}, OptionError, "a value is missing"),
    ],
)
def test_what_cannot_be_meant(asked: dict[str, str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Axes.parse(**asked)


def test_a_baseline_is_found_by_as_much_as_is_said() -> None:
    variants = list(
        Axes.parse(numjobs="1,4").variants(choose("odirect,threads=2,buffered", ".")[0])
    )
    found = {
        text: find_baseline(text, variants)
        for text in ("odirect", "odirect numjobs=4", "odirect,threads=2 numjobs=1", "buffered")
    }
    assert [one and one.label for one in found.values()] == [
        *("odirect,threads=2", "odirect,threads=2 numjobs=4", "odirect,threads=2", "buffered")
    ]
    for text in ("odirect numjobs=2", "odirect,threads=3", "uring", "", " "):
        with pytest.raises(UnknownNameError, match="Known: "):
            find_baseline(text, variants)


def plan_of(workload: str, target: Path, rank: int = 0, **axes: str) -> Any:
    return make_plan(
        workload=workload,
        writers="buffered",
        target=target,
        size="64MiB",
        rank=rank,
        axes=Axes.parse(**axes),
    )


def test_ranks_of_a_node_save_their_own_files(tmp_path: Path) -> None:
    """If they write similar amounts; otherwise each process has a copy of the chosen rank's
    files."""
    sharded = plan_of("llama7b-fsdp", tmp_path, numjobs="2,4", rank=2)
    assert sharded.ranks == (2, 3, 4, 5)
    assert len({files[0][0].path for files in sharded.files_of_jobs}) == 4
    assert plan_of("llama7b", tmp_path, numjobs="3").ranks == (0, 0, 0)  # rank 0 writes the most
    last = sharded.workload.world_size - 1
    assert plan_of("llama7b-fsdp", tmp_path, numjobs="2", rank=last).ranks == (last, last)


def test_processes_share_the_memory_and_the_space(tmp_path: Path, tiny: Workload) -> None:
    plan = plan_of("llama7b", tmp_path, numjobs="1,4")
    assert local_setup(plan).pool_bytes == plan.pool_bytes // 4
    assert plan.written_bytes == plan.repeat.times * plan.size_bytes * (1 + 4 + _jobs(plan))
    assert "1, 4 at once: a copy of rank 0 each" in "\n".join(plan_lines(plan))


def test_a_plan_names_the_ways_to_restore(tmp_path: Path) -> None:
    plan = plan_of("llama7b-export", tmp_path, restore_as="same,tp=8")
    line = "restores  all, then what one of 8 tensor parallel ranks loads"
    assert line in list(plan_lines(plan))


def _jobs(plan: Any) -> int:
    return len(plan.to_dict()["ceiling_jobs"])


def test_more_processes_than_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("iobench.bench.plan.available_bytes", lambda: 600 * MIB)
    with pytest.raises(UsageError, match=r"--numjobs 4: each process takes .* choose fewer"):
        plan_of("llama7b", tmp_path, numjobs="4")
