"""`iobench run` over three ranks on two nodes, which are network namespaces. Needs root."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.meddling import meddling
from support.nodes import Nodes, open_nodes
from support.rank_commands import job_number, rank_commands
from support.ranks import torchrun_variables
from support.sample_checks import check_samples

from iobench.bench.fio import JOBS
from iobench.report.summary import summarise
from iobench.results import ResultFile, read

_RANKS = [0, 0, 1]
"""The node of each rank."""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with open_nodes(2, directory=tmp_path_factory.mktemp("nodes")) as made:
        yield made


def _run(
    nodes: Nodes,
    arguments: tuple[str | Path, ...],
    tmp_path: Path,
    *,
    fio: bool = False,
    **environ: str,
) -> tuple[ResultFile, str, str]:
    """Run the command in all ranks; return the record, and what rank 0 prints."""
    common = ["run", "--repeat", "1", "--size", "full"]
    common += [] if fio else ["--no-fio"]
    first = nodes[_RANKS[0]].address
    environments = torchrun_variables(_RANKS, job_number(), first, **environ)
    with rank_commands(
        (*common, *arguments, "-o", tmp_path / "run.jsonl"),
        environments,
        tmp_path,
        nodes=[nodes[node].pid for node in _RANKS],
    ) as ranks:
        (code, out, err), *others = ranks.ends()
    assert code == 0, err
    assert others == [(0, "", "")] * 2  # rank 0 alone prints
    return read(tmp_path / "run.jsonl"), out, err


def test_a_slow_node_is_named(nodes, tiny_path, target, tmp_path) -> None:
    """All ranks are in the record; the straggler, the interface and the clocks are told. fio has
    run on both nodes at once."""
    record, out, err = _run(
        nodes,
        ("-w", tiny_path, "--target", target, "--writer", "late"),
        tmp_path,
        fio=True,
        PYTHONPATH=meddling(tmp_path),
        GLOO_SOCKET_IFNAME="eth0",
    )
    assert os.listdir(target) == []
    check_samples(record)
    world = record.run.world
    assert (world.size, world.nodes, world.node) == (3, 2, (0, 0, 1))
    assert world.hosts == ("node0", "node0", "node1")
    assert world.restored_from == (2, 0, 1)
    assert err.count("network   eth0 (10.77.0.1, GLOO_SOCKET_IFNAME)") == 1
    assert "nodes     2 (node0, node1), started by torchrun" in err
    assert "clocks    compared with rank 0's, within" in err
    assert all(error_s > 0 for error_s in world.clock_error_s[1:])
    save, _ = record.samples
    assert len(save.jobs_done_s) == len(save.jobs_bytes) == 3
    assert save.jobs_done_s[2] == max(save.jobs_done_s)
    assert {one.operation for one in record.ceiling} == {"save", "restore"}
    sizes = {job.name: job.size_for(record.run.workload.bytes) for job in JOBS}
    for one in record.ceiling:
        assert (one.error, one.bytes) == (None, 2 * sizes[one.job["name"]])
    assert "stragglers of late save: host node1: rank 2 in 1 of 1, up to " in out


def test_slices(nodes, tiny_path, target, tmp_path) -> None:
    """The files of rank 0 are saved once: by it, by all, or by one rank of each node. All ranks
    restore all of them, also some tensors, and together."""
    record, _, err = _run(
        nodes,
        (
            *("-w", tiny_path, "--target", target, "--writer", "odirect,peer:torch-save"),
            *("--slices", "off,all,1", "--restore-mode", "all,all-gather"),
        ),
        tmp_path,
    )
    assert "left out  peer:torch-save with --slices" in err
    assert "replicas of rank 0, which save its files once, and each restores them" in err
    assert os.listdir(target) == []
    check_samples(record)
    assert {one.verdict for one in summarise(record).summaries} == {"VALID"}
    size = record.run.workload.bytes
    shares = {}
    for one in record.samples:
        if one.operation == "save":
            shares[one.axes.slices] = one.jobs_bytes
            assert one.bytes == size
            assert one.stored.problems == ()
        else:
            assert one.jobs_bytes == (size,) * 3
            assert "network" in one.paths or one.axes.restore_mode == "all"
    # 64 KiB is the least unit of a share. Nodes have equal shares, then the ranks of a node.
    assert shares["off"] == (size, 0, 0)
    assert shares["all"] == pytest.approx((size / 4, size / 4, size / 2), abs=65536)
    assert shares["1"] == pytest.approx((size / 2, 0, size / 2), abs=65536)
