"""Reports and comparisons of a run of several targets: the faster target, and no mixed samples."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from support.terminal import Terminal, without_styles

from iobench.bench.judging.verdict import VerdictStatus
from iobench.claims.claims import study
from iobench.claims.reproduction import judge_records
from iobench.environment import Storage
from iobench.errors import ResultFileError
from iobench.goodput.measured import from_results
from iobench.report.answer import answer
from iobench.report.compare import compare, compare_document
from iobench.report.facts import unlike
from iobench.report.grid import wrapped
from iobench.report.render import render
from iobench.report.run import notes, report_document
from iobench.report.summary import summarise
from iobench.results import ResultFile, ResultWriter, Series, load, read, to_plain
from iobench.results.setting import labels

RECORDED = read(Path(__file__).parents[1] / "results" / "recorded.jsonl")
A, B, MEMORY = "/mnt/nvme0/bench", "/mnt/lustre/scratch", "/dev/shm/iobench"


def run_of(seconds: Mapping[str, Mapping[str, float]], repeat: int = 5, **plan: Any) -> ResultFile:
    """The recorded run in several targets, with the seconds of each writer's operations in each
    target."""
    storage = RECORDED.run.environment.storage
    storages = {
        place: Storage(fs_type="tmpfs") if place == MEMORY else storage for place in seconds
    }
    names = list(seconds)
    asked = {
        "target": ",".join(names),
        "targets": names,
        "no_ceiling": {},
        "baseline": {"target": names[0], "label": names[0]},
    }
    samples = [
        replace(s, setting=s.setting.at(target=place), elapsed_s=times[s.writer], phases_s={})
        for place, times in seconds.items()
        for s in RECORDED.samples
        if s.writer in times and s.repetition < repeat
    ]
    ceiling = [
        replace(c, target=place, elapsed_s=min(times.values()) / 2)
        for place, times in seconds.items()
        for c in RECORDED.ceiling
    ]
    environment = replace(RECORDED.run.environment, storage=Storage(), storages=storages)
    run = replace(
        RECORDED.run, environment=environment, plan={**RECORDED.run.plan, **asked, **plan}
    )
    return replace(RECORDED, run=run, samples=tuple(samples), ceiling=tuple(ceiling))


TWICE = run_of({A: {"odirect": 2.0, "buffered": 8.0}, B: {"odirect": 1.0, "buffered": 3.0}})


def said(result: ResultFile) -> dict[str, tuple[str, ...]]:
    return {line.subject: line.texts for line in answer(summarise(result))}


def shown(result: ResultFile, name: str = "table") -> str:
    stream = io.StringIO()
    render(report_document(summarise(result)), name, stream)
    return stream.getvalue()


def test_the_answer_begins_with_the_faster_target() -> None:
    """The writers of each target follow, without the target in their labels, and then the next
    command."""
    lines = said(TWICE)
    assert list(lines)[:3] == ["Target", "Save", "Restore"]
    assert lines["Target"] == (
        f"{B} saves 2.0x faster than {A} (2.0x to 2.0x)",
        f"{B} restores 2.0x faster than {A} (2.0x to 2.0x)",
    )
    for operation in ("Save", "Restore"):
        texts = lines[operation]
        assert texts[0] == f"{A}: odirect, 4.0x faster than buffered (4.0x to 4.0x), 50% of fio"
        assert texts[2] == f"{B}: odirect, 3.0x faster than buffered (3.0x to 3.0x), 50% of fio"
        assert all("instead of" in text for text in (texts[1], texts[3]))
    assert lines["Next"][0] == f"iobench autotune llama7b --target {B}"


def test_a_faster_target_needs_what_a_winner_needs() -> None:
    """Five repetitions, and a difference beyond the noise. Three targets may share the lead."""
    few = run_of({A: {"odirect": 2.0}, B: {"odirect": 1.0}}, repeat=3)
    assert said(few)["Target"][0] == (
        f"3 samples cannot name the faster one; highest median: {B} saves"
    )
    assert said(few)["Next"][0] == f"iobench run llama7b --target {A},{B} --repeat 6"
    same = run_of({A: {"odirect": 1.0}, B: {"odirect": 1.01}})
    assert said(same)["Target"][0] == f"{A} or {B} (undecided) saves faster"
    three = run_of({A: {"odirect": 4.0}, B: {"odirect": 1.0}, MEMORY: {"buffered": 1.01}})
    assert (
        said(three)["Target"][0]
        == f"{B} or {MEMORY} (undecided) saves 4.0x faster than {A} (4.0x to 4.0x)"
    )


def test_a_target_without_a_valid_figure_is_not_compared() -> None:
    result = run_of({A: {"odirect": 2.0}, B: {"odirect": 1.0}})
    wrong = [replace(s, bytes=s.bytes - 1) if s.axes.target == B else s for s in result.samples]
    lines = said(replace(result, samples=tuple(wrong)))
    assert "Target" not in lines
    assert lines["Save"][-1] == f"{B}: no valid figure: odirect is INVALID"


def test_a_comparison_of_long_names_fits_80_columns(terminal: Terminal) -> None:
    """Each name has lines of its own above its figures, and is broken between its words only."""
    far = "/mnt/the-parallel-file-system-of-the-cluster/projects/checkpoints"
    one = run_of({A: {"odirect": 2.0, "buffered": 8.0}, far: {"odirect": 1.0, "buffered": 3.0}})
    options = {"block_size": 64 << 20, "threads": 16, "fallocate": False}
    other = [replace(s, setting=replace(s.setting, options=options)) for s in one.samples]
    old = replace(one, samples=(*one.samples, *other), failures=())
    new = replace(
        old,
        samples=tuple(
            replace(s, elapsed_s=1.5 * s.elapsed_s) if s.writer == "odirect" else s
            for s in old.samples
        ),
    )
    comparison = compare([old], [new], 0.05)
    render(compare_document(comparison), "table", terminal)
    lines = without_styles(terminal.getvalue()).splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.endswith("worse (regression)") for line in lines) == 8
    names = labels(row.setting for row in comparison.rows)
    assert max(map(len, names)) > 100
    for name, row in zip(names, comparison.rows, strict=True):
        broken = wrapped(name, 80).splitlines()
        at = next(n for n in range(len(lines)) if lines[n : n + len(broken)] == broken)
        assert lines[at + len(broken)].split()[0] in ("save", "restore"), row


def test_ratios_are_to_the_first_target() -> None:
    """Of the same writer, pair by pair. The header of the column names the first target."""
    table = shown(TWICE).splitlines()
    (header,) = (line for line in table if line.startswith("writer"))
    assert f"times {A}" in header
    rows = {one.setting.name: one for one in summarise(TWICE).summaries if one.operation == "save"}
    assert rows[f"odirect target={B}"].ratio == pytest.approx(2.0)
    assert rows[f"buffered target={B}"].ratio == pytest.approx(8 / 3)
    assert rows[f"odirect target={A}"].ratio is None
    assert f"baseline: {A}; ratios are of pairs, each with its interval" in shown(TWICE, "md")
    one = RECORDED.run.plan["writers"][-1] | {"target": B, "label": f"odirect target={B}"}
    fixed = summarise(run_of({A: {"odirect": 2.0}, B: {"odirect": 1.0}}, baseline=one))
    assert [row.ratio for row in fixed.summaries[:2]] == [None, pytest.approx(0.5)]


def test_every_format_keeps_the_targets_apart() -> None:
    """Winners, ceilings and rows name their target. A run of one target has no such key."""
    document = json.loads(shown(TWICE, "json"))
    assert [(one["target"], one["operation"]) for one in document["winners"]] == [
        (B, "save"),
        (A, "save"),
        (B, "restore"),
        (A, "restore"),
    ]
    assert [one["fastest"] for one in document["target_winners"]] == [B, B]
    assert document["target_winners"][0]["ratio"] == pytest.approx(2.0)
    assert set(document["ceilings"]) == set(document["environment"]["storages"]) == {A, B}
    rates = [document["ceilings"][place]["save_bytes_per_s"] for place in (A, B)]
    assert rates[1] == pytest.approx(2 * rates[0])
    assert document["ceiling"]["save_bytes_per_s"] is None
    rows = list(csv.DictReader(shown(TWICE, "csv").splitlines()))
    assert {row["target"] for row in rows} == {A, B}
    single = to_plain(summarise(RECORDED))
    assert not {"ceilings", "target_winners"} & set(single)
    assert not any("target" in one for one in (*single["summaries"], *single["winners"]))
    assert "target" not in shown(RECORDED, "csv").splitlines()[0].split(",")


def test_notes_name_the_target() -> None:
    """Ceilings and notes about durability are each about one target."""
    result = run_of({A: {"odirect": 2.0, "buffered": 8.0}, MEMORY: {"odirect": 1.0}})
    only_a = tuple(one for one in result.ceiling if one.target == A)
    plan = {**result.run.plan, "no_ceiling": {MEMORY: "fio is elsewhere"}}
    result = replace(result, ceiling=only_a, run=replace(result.run, plan=plan))
    found = [*chain(*notes(summarise(result)))]
    assert sum(note.startswith(f"fio in {A}: ") for note in found) == 2
    assert f"fio in {MEMORY}: not measured (fio is elsewhere)" in found
    (volatile,) = (note for note in found if note.startswith("not durable: tmpfs"))
    assert A not in volatile
    text = io.StringIO()
    render(report_document(summarise(result)), "table", text, details=True)
    assert f"{MEMORY}: tmpfs" in text.getvalue()


def test_a_plan_counts_each_target_by_itself() -> None:
    methods, _ = from_results(TWICE)
    assert [one.name for one in methods] == [
        f"odirect target={B}",
        f"odirect target={A}",
        f"buffered target={B}",
        f"buffered target={A}",
    ]
    assert methods[1].costs.blocking_s == pytest.approx(2 * methods[0].costs.blocking_s)


def test_a_claim_is_not_judged_across_targets() -> None:
    with pytest.raises(ResultFileError, match=r"is of 2 targets; a claim is judged by .* of one"):
        judge_records(study("hybrid-io"), [TWICE])


def test_compare_pairs_only_the_same_target() -> None:
    """In any order of the targets. fio in one target is no control of another."""
    slower = {A: {"odirect": 2.0, "buffered": 8.0}, B: {"odirect": 2.0, "buffered": 6.0}}
    found = compare([TWICE], [run_of(dict(reversed(slower.items())))], 0.05)
    assert found.unlike == ()
    ratios = {(row.setting.name, row.operation): row.ratio for row in found.rows}
    assert len(ratios) == 8
    for (name, _), ratio in ratios.items():
        assert ratio == pytest.approx(0.5 if name.endswith(B) else 1.0)
    assert found.controls[f"fio target={B} save"] == pytest.approx(0.5)
    for row in found.rows:  # beyond the control's 0.5 in one of them, beyond 2% in the other
        floor = 2 * 1.02 - 1 if row.axes.target == B else 0.02
        assert row.floor == pytest.approx(floor)


def test_compare_refuses_other_targets() -> None:
    """One target cannot be compared with several. A writer is not paired with itself in another
    target."""
    elsewhere = run_of({A: {"odirect": 2.0}, MEMORY: {"odirect": 1.0}})
    old = run_of({A: {"odirect": 2.0}, B: {"odirect": 1.0}})
    assert unlike(old.run, elsewhere.run) == [f"targets: {B}, {A} before, {MEMORY}, {A} now"]
    found = compare([old], [elsewhere], 0.05)
    assert {row.setting.name for row in found.rows} == {f"odirect target={A}"}
    assert set(found.missing) == {f"odirect target={B} {what}" for what in ("save", "restore")}
    assert unlike(RECORDED.run, old.run) == [f"targets: one before, {B}, {A} now"]
    assert {row.axes.target for row in compare([RECORDED], [old], 0.05).rows} == set()


def test_a_table_has_the_storage_of_each_sample(tmp_path: Path) -> None:
    """After writing, reading and loading."""
    result = run_of({A: {"odirect": 2.0}, MEMORY: {"odirect": 1.0}})
    bars = Series(interval_s=0.1, completed=(2**20,), counter=None, counted=None)
    result = replace(result, samples=tuple(replace(s, series=bars) for s in result.samples))
    path = tmp_path / "run.jsonl"
    with ResultWriter(path) as file:
        for record in (result.run, *result.samples, *result.ceiling):
            file.write(record)
    again = read(path)
    assert (again.run, again.samples, again.ceiling) == (
        result.run,
        result.samples,
        result.ceiling,
    )
    frame = load(path)
    kinds = frame.groupby("target")["storage.fs_type"].unique()
    assert kinds[MEMORY].tolist() == ["tmpfs"]
    assert kinds[A].tolist() == [RECORDED.run.environment.storage.fs_type]
    verdicts = {(one.axes.target, one.verdict) for one in summarise(again).summaries}
    assert verdicts == {(A, VerdictStatus.SCALED), (MEMORY, VerdictStatus.SCALED)}
