"""`iobench reproduce` as a user calls it: measured on a real file system, and from records."""

import json
import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records are written to a directory of the test."""
    monkeypatch.chdir(tmp_path)


def test_hybrid_io_is_measured_and_judged_again(iobench_inside, target) -> None:
    """Every claim gets an answer, the wall clock by training; the records give the same answers
    again."""
    done = iobench_inside(
        *("reproduce", "hybrid-io", "--target", target, "--size", "16MiB", "--repeat", "1"),
        *("--format", "json"),
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["schema"] == "iobench.findings/5"
    assert os.listdir(target) == []
    found = document["findings"]
    assert [(one["claim"]["workload"], one["claim"]["measure"]) for one in found] == [
        (workload, measure)
        for workload in ("llama7b", "gpt5b-nemo")
        for measure in ("save", "restore", "wall clock")
    ]
    assert all(one["reason"] and one["setting"] for one in found)
    assert {one["answer"] for one in found} <= {"undecided", "not comparable"}  # by one pair
    records = document["records"]
    assert len(records) == 4
    again = [part for record in records for part in ("--results", record)]
    judged = iobench_inside("reproduce", "hybrid-io", *again, "--format", "json")
    assert json.loads(judged.stdout) == document
    table = iobench_inside("reproduce", "hybrid-io", *again).stdout
    assert "hybrid over buffered" in table
    assert "hybrid sync compared with buffered sync" in table
    assert (
        "| llama7b | writes 1.7x |"
        in iobench_inside("reproduce", "hybrid-io", *again, "--format", "md").stdout
    )


@pytest.mark.parametrize(
    ("name", "sides", "figure"),
    [
        ("checkfreq", ["hybrid lazy=1 compared with none"] * 2, "%"),
        pytest.param(
            *("pccheck", ["hybrid lazy=2 compared with none"] * 2, "%"),
            marks=pytest.mark.exhaustive,  # judged like checkfreq
        ),
        (
            "async",
            [
                "hybrid async=2 compared with peer:torch-save sync",
                "hybrid lazy=2 compared with peer:torch-save sync",
                "hybrid async=2 compared with hybrid sync",
            ],
            "x",
        ),
    ],
)
def test_claims_about_training(name, sides, figure, iobench_inside, target) -> None:
    """Each is measured by training. It is too small for the claim's setting, and the answer says
    so."""
    done = iobench_inside(
        *("reproduce", name, "--target", target, "--size", "4MiB", "--repeat", "1"),
        *("--format", "json"),
    )
    assert done.returncode == 0, done.stderr
    assert os.listdir(target) == []
    document = json.loads(done.stdout)
    found = document["findings"]
    for one, compared in zip(found, sides, strict=True):
        assert one["setting"].startswith(compared)
        assert one["ours"] is not None
        assert one["answer"] == "not comparable"
        assert "choose a larger --size" in one["reason"]
    again = [part for record in document["records"] for part in ("--results", record)]
    table = iobench_inside("reproduce", name, *again, "--format", "md")
    cells = [line.split(" | ") for line in table.stdout.splitlines() if "not comparable" in line]
    assert len(cells) == len(sides)
    assert all(cell[2].endswith(figure) for cell in cells)
