"""`iobench plan` as a user calls it: with the published record, by hand, in every format."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., "subprocess.CompletedProcess[str]"]
RECORD = Path(__file__).parents[1] / "unit" / "results" / "recorded.jsonl"
ZERO = ("--size", "0")
HAND = ("--save", "30s", "--restore", "60s", "--nodes", "2048")


def document(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["schema"] == "iobench.plan/1"
    return found


def test_plan_with_the_reference_record(iobench_inside: Command) -> None:
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
        simulated = row["proposals"][0]["simulated"]
        assert abs(simulated["ettr"] - row["ettr"]) < 4 * simulated["ettr_error"]
        assert row["save_samples"] == row["restore_samples"] == 5
    assert rows["odirect"]["ettr"] > rows["buffered"]["ettr"]
    assert rows["odirect"]["saved_per_month"]["gpu_hours"] > 0
    assert any("scaled to 75.31 GiB by the measured rate" in note for note in found["notes"])
    table = iobench_inside("plan", "--results", RECORD, *options, "--formulas").stdout
    assert "by the exact equation for failures without memory" in table
    assert rows["odirect"]["interval_method"] == "equation"
    assert rows["odirect"]["constant_rate"] is None
    assert table.startswith("Save every 13 min 55 s (216 steps of 3.87 s): 17.3% of the time is ")
    low, high = rows["odirect"]["ettr_ci95"]
    assert f"{rows['odirect']['ettr']:.4f}  {low:.4f}-{high:.4f}" in table
    assert "94% interval" in table  # of 5 samples
    assert "saved/month (94% interval)" in table
    assert "scaled to 75.31 GiB by the measured rate" in table
    assert "simulated: 100,000 failures for each figure, seed 0" in table


def test_plan_over_sizes(iobench_inside: Command) -> None:
    """One row for each size and writer, up to 131,072 nodes, and the limits of the formulas."""
    done = iobench_inside(
        "plan", "--results", RECORD, "--nodes", "1024-131072", "--simulate", "20000"
    )
    assert done.returncode == 0
    rows = [line.split()[0] for line in done.stdout.splitlines() if "  odirect " in line]
    assert rows[0] == "1,024"
    assert rows[-1] == "131,072"
    assert len(rows) == 8
    assert "as Young, availability and the first-order ETTR assume [from " in done.stdout


def test_plan_by_hand(iobench_inside: Command) -> None:
    """Synchronous and asynchronous saves; the same seed gives the same answer."""
    behind = ("--blocking", "2s", "--persist", "20s", "--step", "3.87s", "--simulate", "5000")
    done = iobench_inside("plan", *HAND, *behind, "--format", "json")
    modes = {one["mode"]: one for one in document(done)["forecasts"]}
    assert modes["sync"]["baseline"]
    expected = {"blocking_s": 2.0, "restore_s": 60.0, "persist_s": 20.0, "slots": 1}
    assert modes["async"]["costs"] == expected
    assert modes["async"]["ettr"] > modes["sync"]["ettr"]
    assert modes["async"]["ettr_ci95"] is None
    assert iobench_inside("plan", *HAND, *behind, "--format", "json").stdout == done.stdout
    markdown = iobench_inside("plan", *HAND, *behind, "--formulas", "--format", "md").stdout
    assert "| given | async | 2.00 s + 20.00 s |" in markdown
    assert "| given | async | CheckFreq | 61.9 s | 16 |" in markdown


def test_plan_for_failures_in_groups(iobench_inside: Command) -> None:
    """The shape changes interval and loss; the answer says how, and by which method."""
    options = ("--results", RECORD, "--nodes", "2048", "--failure-shape", "0.7")
    options += ("--simulate", "20000")
    found = document(iobench_inside("plan", *options, "--format", "json"))
    for row in found["forecasts"]:
        assert (row["failure_shape"], row["interval_method"]) == (0.7, "numeric")
        constant = row["constant_rate"]
        assert constant["ettr_change"] == row["ettr"] - constant["ettr"] > 0
        assert constant["ettr_change_ci95"][0] <= constant["ettr_change"]
        assert row["ettr_ci95"][0] <= row["ettr"] <= row["ettr_ci95"][1]
        names = [one["formula"] for one in row["proposals"]]
        assert names[:3] == ["best", "constant rate", "Young"]
        assert row["proposals"][1]["interval_s"] == constant["interval_s"] < row["interval_s"]
        for one in row["proposals"]:
            assert one["ettr"] <= row["ettr"]
            assert abs(one["simulated"]["ettr"] - one["ettr"]) < 4 * one["simulated"]["ettr_error"]
    table = iobench_inside("plan", *options, "--formulas").stdout
    # What test_plan_with_the_reference_record has at the constant rate.
    assert table.splitlines()[1] == (
        "With a constant failure rate: save every 13 min 55 s: 17.3% of the time is lost."
    )
    assert "6.5 failures per 1000 node-days (Weibull shape 0.7)" in table
    assert "by a numeric search for shape 0.7" in table


def test_invalid_samples_are_left_out_by_default(iobench_inside: Command, tmp_path: Path) -> None:
    """A record with warm restores of odirect: that writer is named and not planned for."""
    lines = []
    for line in RECORD.read_text().splitlines():
        record = json.loads(line)
        if record.get("writer") == "odirect" and record["operation"] == "restore":
            record["cold"]["resident_fraction"] = 0.5
        lines.append(json.dumps(record))
    warm = tmp_path / "warm.jsonl"
    warm.write_text("\n".join(lines) + "\n")
    options = ("--results", warm, "--nodes", "64", "--simulate", "0", "--format", "json")
    found = document(iobench_inside("plan", *options))
    assert {one["writer"] for one in found["forecasts"]} == {"uncached", "buffered"}
    assert any(note.startswith("odirect: 5 invalid samples left out") for note in found["notes"])
    found = document(iobench_inside("plan", *options, "--include-invalid"))
    assert {one["writer"] for one in found["forecasts"]} == {"odirect", "uncached", "buffered"}


@pytest.mark.parametrize(
    ("code", "words", "arguments"),
    [
        (2, "--nodes", ("--save", "30s", "--restore", "60s")),
        (2, "give --results FILE, or times by hand", ("--nodes", "8")),
        (2, "give --results FILE, or times by hand", ("--nodes", "8", "--save", "30s")),
        (2, "write 2048, 64,512,2048 or 1024-131072", (*HAND[:4], "--nodes", "many")),
        (2, "the smaller number comes first", (*HAND[:4], "--nodes", "64-8")),
        (2, "without thousands separators", (*HAND[:4], "--nodes", "2,048")),
        (2, "from 1 up", (*HAND[:4], "--nodes", "0")),
        (2, "is not a time", (*HAND, "--restart", "soon")),
        (2, "budget must be above zero", (*HAND, "--budget", "0%", "--formulas")),
        (2, "--budget: only --formulas and --format json", (*HAND, "--budget", "3%")),
        (2, "failures-per-1000-node-days must be", (*HAND, "--failures-per-1000-node-days", "0")),
        (2, "--persist applies to asynchronous saves", (*HAND, "--persist", "3s")),
        (2, "--size: only --results has samples", (*HAND, "--size", "3GiB")),
        (2, "--size: only --results has samples", (*HAND, "--size", "")),
        (2, "--size 0: a node saves more than 0", ("--nodes", "8", "--results", RECORD, *ZERO)),
        (2, "--save: --results has the", ("--nodes", "8", "--results", RECORD, "--save", "")),
        (2, "unknown baseline 'bufered'; did you mean 'buffered'?", (RECORD, "bufered")),
        (2, "--save, --restore: --results has the", (*HAND, "--results", RECORD)),
        (2, "Invalid value for '--seed'", (*HAND, "--seed", "-1")),
        (2, "less than or equal to 4294967295", (*HAND, "--seed", "4294967296")),
        (2, "failure-shape must be from 0.3 to 3, and is 0;", (*HAND, "--failure-shape", "0")),
        (2, "too many to simulate", ("--save", "0.001ms", "--restore", "1s", "--nodes", "1")),
        (1, "no such file", ("--nodes", "8", "--results", "nowhere.jsonl")),
    ],
)
def test_what_cannot_be_meant(
    iobench_inside: Command, code: int, words: str, arguments: tuple[str | Path, ...]
) -> None:
    """One line on stderr with the problem and the allowed values; no report."""
    if arguments[0] == RECORD:
        arguments = ("--nodes", "8", "--results", RECORD, "--baseline", str(arguments[1]))
    done = iobench_inside("plan", *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("iobench: ")
    assert words in done.stderr


def test_plan_with_memory_checkpoints(iobench_inside: Command) -> None:
    """Snapshots in other nodes' memory, storage less often; the options need each other."""
    snapshot = ("plan", *HAND, "--blocking", "0.5s", "--persist", "200s")
    options = ("--memory-restore", "3s", "--memory-replicate", "5s", "--memory-recovers", "95%")
    found = document(iobench_inside(*snapshot, *options, "--format", "json"))
    by_mode = {one["mode"]: one for one in found["forecasts"]}
    assert by_mode["sync"]["memory"] is None
    memory = by_mode["async"]["memory"]
    assert memory["interval_s"] * memory["storage_every"] >= 200
    assert memory["ettr"] > by_mode["async"]["ettr"]
    assert abs(memory["ettr"] - memory["simulated"]) < 0.01
    text = iobench_inside(*snapshot, *options, "--memory-every", "30s", "--simulate", "0").stdout
    assert "With a memory checkpoint every 30 s and storage every 3 min 30 s: " in text
    assert "95% of the failures leave every rank's state in some memory" in text
    alone = iobench_inside("plan", *HAND, *options)
    assert (alone.returncode, "needs --blocking" in alone.stderr) == (2, True)
    unused = iobench_inside(*snapshot, "--memory-every", "30s")
    assert (unused.returncode, "--memory-every" in unused.stderr) == (2, True)
    slow = iobench_inside(*snapshot, *options, "--memory-every", "30s", "--storage-every", "2")
    assert (slow.returncode, "storage cannot keep up" in slow.stderr) == (2, True)


def test_plan_needs_the_nodes(iobench_inside: Command) -> None:
    """One line on stderr and the exit code 2."""
    done = iobench_inside("plan", "--save", "30s", "--restore", "60s")
    assert (done.returncode, "give --nodes" in done.stderr) == (2, True)
