"""`iobench plan` as a user calls it: with the published record, by hand, in every format."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

RECORD = Path(__file__).parents[1] / "unit" / "results" / "recorded.jsonl"
HAND = ("--save", "30s", "--restore", "60s", "--nodes", "2048")


def document(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["schema"] == "iobench.plan/2"
    return found


def test_plan_with_the_reference_record(iobench_inside) -> None:
    """Each writer has an interval, ETTR, lost work and savings."""
    options = (
        *("--nodes", "2048", "--gpus-per-node", "8"),
        *("--failures-per-1000-node-days", "6.5", "--restart", "5min"),
    )
    found = document(iobench_inside("plan", "--results", RECORD, *options, "--format", "json"))
    rows = {one["writer"]: one for one in found["forecasts"]}
    assert set(rows) == {"odirect", "uncached", "buffered"}
    assert rows["buffered"]["baseline"]
    assert rows["buffered"]["saved_per_month"] is None
    for row in rows.values():
        assert row["gpus"] == 16_384
        assert row["mtbf_s"] == pytest.approx(86_400 / (2048 * 0.0065))
        assert row["ettr_ci95"][0] <= row["ettr"] <= row["ettr_ci95"][1]
        assert row["save_samples"] == row["restore_samples"] == 5
    assert rows["odirect"]["ettr"] > rows["buffered"]["ettr"]
    assert rows["odirect"]["saved_per_month"]["gpu_hours"] > 0
    assert any("scaled to 75.31 GiB by the measured rate" in note for note in found["notes"])
    table = iobench_inside("plan", "--results", RECORD, *options).stdout
    assert "by the exact equation for failures without memory" in table
    assert rows["odirect"]["interval_raised"] is False
    assert table.startswith(
        "Answer: Save every 13 min 55 s (216 steps of 3.87 s): 17.3% of the time is "
    )
    low, high = rows["odirect"]["ettr_ci95"]
    assert f"{rows['odirect']['ettr']:.4f}  {low:.4f}-{high:.4f}" in table
    assert "94% interval" in table  # of 5 samples
    assert "scaled to 75.31 GiB by the measured rate" in table


def test_a_node_saves_the_files_of_its_ranks(iobench_inside) -> None:
    """All 8 ranks of a node, or as many as it has GPUs; the first writes DCP's index too."""
    workload = ("llama3.1-405b", "--nodes", "4", "--results", RECORD)
    for gpus, size in (("8", "71.38 GiB"), ("1", "9.33 GiB")):
        table = iobench_inside("plan", *workload, "--gpus-per-node", gpus).stdout
        assert f"scaled to {size} by the measured rate" in table


@pytest.mark.parametrize(("nodes", "warned"), [("1", False), ("2", True), ("1,64", True)])
def test_a_job_larger_than_its_workload(nodes, warned: bool, iobench_inside) -> None:
    """llama7b has 8 ranks: 2 nodes of 8 GPUs are no job of it, and a warning says what is one."""
    done = iobench_inside("plan", "--results", RECORD, "--nodes", nodes)
    assert done.returncode == 0
    found = "warning: llama7b has 8 ranks" in done.stdout
    assert found is warned
    assert ("--nodes 1, or a workload of more ranks" in " ".join(done.stdout.split())) is warned


def test_plan_over_sizes(iobench_inside) -> None:
    """One row for each size and writer, up to 131,072 nodes, and where no job can train."""
    done = iobench_inside("plan", "--results", RECORD, "--nodes", "1024-131072")
    assert done.returncode == 0
    rows = [line.split()[0] for line in done.stdout.splitlines() if "  odirect " in line]
    assert rows[0] == "1,024"
    assert rows[-1] == "131,072"
    assert len(rows) == 8
    assert (
        "recovery takes longer than the MTBF: most restarts fail themselves [from " in done.stdout
    )


def test_plan_by_hand(iobench_inside) -> None:
    """Synchronous and asynchronous saves; equal times give the same answer."""
    behind = ("--blocking", "2s", "--step", "3.87s")
    done = iobench_inside("plan", *HAND, *behind, "--format", "json")
    modes = {one["mode"]: one for one in document(done)["forecasts"]}
    assert modes["sync"]["baseline"]
    expected = {"blocking_s": 2.0, "restore_s": 60.0, "persist_s": 30.0}
    assert modes["async"]["costs"] == expected
    assert modes["async"]["ettr"] > modes["sync"]["ettr"]
    assert modes["async"]["ettr_ci95"] is None
    assert iobench_inside("plan", *HAND, *behind, "--format", "json").stdout == done.stdout
    markdown = iobench_inside("plan", *HAND, *behind, "--format", "md").stdout
    assert "| given | async | 2.00 s + 30.00 s |" in markdown
