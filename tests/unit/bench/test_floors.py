"""The noise floor of a run is that of the newest A/A record beside it of its machine and target."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from iobench.bench.judging.floors import Floor, floors_beside
from iobench.claims.claims import CLAIMS, Answer
from iobench.claims.reproduction import judge_records
from iobench.environment import Storage
from iobench.environment.blockdev import BlockDevice
from iobench.report.answer import answer
from iobench.report.compare import compare, notes
from iobench.report.summary import summarise
from iobench.results import ResultFile, Run, Sample, read
from iobench.results.codec import to_record
from iobench.stats.comparison import LEAST_FLOOR
from iobench.tune.journal import TuningRequest
from iobench.tune.tuning import Tuning
from iobench.units import GIB, MIB

RECORDED = read(Path(__file__).parents[1] / "results" / "recorded.jsonl")
_FORTH, _BACK = [1.0] * 5, [1.2] * 5  # a floor of 20%


def twins(seconds: Sequence[float], again: Sequence[float]) -> list[Sample]:
    """Verified saves of `odirect`, two in each repetition, with these durations."""
    proof = next(s.verified for s in RECORDED.samples if s.operation == "restore")
    saves = [s for s in RECORDED.samples if (s.writer, s.operation) == ("odirect", "save")]
    return [
        replace(s, elapsed_s=t, phases_s={}, verified=proof)
        for times in (seconds, again)
        for s, t in zip(saves, times, strict=False)
    ]


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes an A/A record beside `run.jsonl`, with a changed header."""

    def written(
        name: str = "aa.jsonl", samples: Sequence[Sample] | None = None, **changed: Any
    ) -> Path:
        taken = twins(_FORTH, _BACK) if samples is None else samples
        run = replace(
            RECORDED.run,
            **({"run_id": name, "plan": {**RECORDED.run.plan, "aa": True}} | changed),
        )
        size = run.workload.bytes  # a sample of another size is INVALID
        sized = {"run_id": run.run_id, "bytes": size, "paths": {}, "device": None}
        records = [run, *(replace(one, **sized) for one in taken)]
        path = tmp_path / name
        path.write_text("".join(f"{json.dumps(to_record(one))}\n" for one in records))
        return path

    return written


@pytest.fixture
def run(tmp_path: Path) -> ResultFile:
    return replace(RECORDED, path=tmp_path / "run.jsonl")


def floor_of(run: ResultFile) -> Floor:
    return floors_beside(run)(("save", None, None), None)


def test_the_floor_is_that_of_the_record_beside_it(run: ResultFile, write: Write) -> None:
    assert floor_of(run) == Floor() == Floor(part=LEAST_FLOOR, record=None)
    path = write()
    assert floor_of(run).part == pytest.approx(0.2)
    assert floor_of(run).record == str(path)
    assert floors_beside(run)(("restore", None, None), None) == Floor(), "it has no restores"


def test_the_newest_counts(run: ResultFile, write: Write) -> None:
    """By the time of its start and not by its name; a newer one without a floor does not count."""
    write("z.jsonl", started_at="2026-11-20T12:00:00.000Z")
    newest = write("a.jsonl", twins(_FORTH, [1.1] * 5), started_at="2026-11-20T12:30:00.000+00:00")
    write("b.jsonl", started_at="2026-11-20T13:00:00.000+02:00")
    write("few.jsonl", twins(_FORTH[:4], _BACK[:4]), started_at="2026-11-21T12:00:00.000Z")
    assert floor_of(run).record == str(newest)
    assert floor_of(run).part == pytest.approx(0.1)


def _machine(**changed: Any) -> dict[str, Any]:
    environment = RECORDED.run.environment
    return {"environment": replace(environment, machine=replace(environment.machine, **changed))}


def _storage(**changed: Any) -> dict[str, Any]:
    environment = RECORDED.run.environment
    return {"environment": replace(environment, storage=replace(environment.storage, **changed))}


def _bytes(factor: float) -> dict[str, Any]:
    workload = RECORDED.run.workload
    return {"workload": replace(workload, bytes=int(factor * workload.bytes))}


@pytest.mark.parametrize(
    "changed",
    [
        _machine(hostname="other"),
        _machine(hostname=None),
        _machine(fingerprint="0123456789ab"),
        _machine(fingerprint=None),
        _storage(fs_type="xfs"),
        _storage(source="/dev/vdb"),
        _storage(mount_point="/mnt/other"),
        _storage(device=BlockDevice(name="vda", type="virtio", size_bytes=2**40)),
        _bytes(0.4),
        _bytes(2.1),
        {"plan": {**RECORDED.run.plan, "aa": True, "numjobs": [4]}},
        {"plan": {**RECORDED.run.plan, "aa": False}},
        {"run_id": RECORDED.run.run_id},
    ],
    ids=str,
)
def test_a_record_in_other_conditions_never_counts(
    run: ResultFile, write: Write, changed: dict[str, Any]
) -> None:
    write(**changed)
    assert floor_of(run) == Floor()


@pytest.mark.parametrize(
    "changed",
    [_bytes(0.6), _bytes(1.9), _storage(path="/mnt/sub", free_bytes=1)],
    ids=str,
)
def test_what_may_differ(run: ResultFile, write: Write, changed: dict[str, Any]) -> None:
    """The size by a factor of two, the directory in the file system, and its free space."""
    write(**changed)
    assert floor_of(run).part == pytest.approx(0.2)


def test_an_anonymised_record_is_of_no_known_machine(run: ResultFile, write: Write) -> None:
    """Copies of two machines have the same word for their hosts."""
    header = replace(run.run, environment=_machine(hostname="host")["environment"])
    write(**_machine(hostname="host"))
    assert floor_of(replace(run, run=header)) == Floor()


def test_other_files_of_the_directory_do_no_harm(
    run: ResultFile, write: Write, tmp_path: Path
) -> None:
    """A tuning's journal, an empty file, and an A/A record that is damaged."""
    older = write("older.jsonl")
    damaged = write("damaged.jsonl", started_at="2026-11-28T12:00:00.000Z")
    damaged.write_bytes(damaged.read_bytes()[:-9])
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "journal.jsonl").write_text('{"schema": "iobench.tune/1", "kind": "tuning"}\n')
    assert floor_of(run).record == str(older)


def test_invalid_samples_do_not_count(run: ResultFile, write: Write) -> None:
    write(samples=[replace(one, verified=None) for one in twins(_FORTH, _BACK)])
    assert floor_of(run) == Floor()


def _of(run: ResultFile, **seconds: float) -> ResultFile:
    """The run with five saves of each writer that all take so long."""
    saves = {
        name: [s for s in RECORDED.samples if (s.writer, s.operation) == (name, "save")][:5]
        for name in seconds
    }
    proof = next(s.verified for s in RECORDED.samples if s.operation == "restore")
    samples = tuple(
        replace(one, elapsed_s=seconds[name], phases_s={}, verified=proof)
        for name, same in saves.items()
        for one in same
    )
    return replace(run, samples=samples)


def test_the_answer_of_a_run_names_the_record(run: ResultFile, write: Write) -> None:
    """A lead of 10% is one by the convention, and none by the record. An A/A of the run itself
    comes first."""
    measured = _of(run, odirect=1.0, buffered=1.1)
    assert summarise(measured).winners[0].equals == ()
    path = write()
    (winner,) = summarise(measured).winners
    assert (winner.equals, winner.floor_record, winner.measured) == (
        ("buffered",),
        str(path),
        False,
    )
    assert winner.floor == pytest.approx(0.2)
    said = [text for line in answer(summarise(measured)) for text in line.texts]
    assert f"differences up to 20.0% of save are noise, by A/A in {path}" in said
    again = replace(run, samples=tuple(twins(_FORTH, [1.05] * 5)))
    (own,) = summarise(again).winners
    assert (own.floor, own.floor_record, own.measured) == (pytest.approx(0.05), None, True)


def test_two_runs_are_compared_by_it(run: ResultFile, write: Write) -> None:
    """With one run a side. With more, the spread between runs decides."""
    old = _of(run, odirect=1.0)
    new = replace(_of(run, odirect=1.1), run=replace(run.run, run_id="new"))
    (row,) = compare([old], [new], 0.05).rows
    assert (row.floor, row.floor_record) == (pytest.approx(LEAST_FLOOR), None)
    path = write()
    found = compare([old], [new], 0.05)
    (row,) = found.rows
    assert (row.floor, row.floor_record) == (pytest.approx(0.2), str(path))
    assert any(f"(A/A in {path})" in line for line in notes(found))
    (row,) = compare([old, replace(old, run=replace(old.run, run_id="b"))], [new], 0.05).rows
    assert (row.floor, row.floor_record) == (pytest.approx(LEAST_FLOOR), None)


def test_a_claim_is_judged_by_it(run: ResultFile, write: Write) -> None:
    """Twice as fast holds for 1.7 times by the convention, and is too near by a floor of 20%."""
    timed = _of(run, odirect=1.0, buffered=2.0)
    ours = [
        replace(one, setting=replace(one.setting, writer="hybrid"))
        if one.writer == "odirect"
        else one
        for one in timed.samples
    ]
    about = replace(CLAIMS["hybrid-io"], claims=CLAIMS["hybrid-io"].claims[:1])
    record = replace(timed, samples=tuple(ours))
    assert judge_records(about, [record])[0].answer is Answer.YES
    path = write()
    (found,) = judge_records(about, [record])
    assert found.answer is Answer.UNDECIDED
    assert found.reason == "the interval ends within 20% of the claim, which may be noise"
    assert found.setting.endswith(f"5 pairs, noise floor 20% (A/A in {path})")


def test_the_run_of_several_targets_has_one_of_each(run: ResultFile, write: Write) -> None:
    environment = run.run.environment
    other = replace(environment.storage, mount_point="/mnt/b")
    storages = {"/mnt/a": environment.storage, "/mnt/b": other}
    there = replace(environment, storage=Storage(), storages=storages)
    both: Run = replace(run.run, environment=there)
    floors = floors_beside(replace(run, run=both))
    path = write()
    assert floors(("save", None, None), "/mnt/a").record == str(path)
    assert floors(("save", None, None), "/mnt/b") == Floor()


def test_a_save_beside_restores_has_a_floor_of_its_own(run: ResultFile, write: Write) -> None:
    write()
    assert floors_beside(run)(("save", None, "restore"), None) == Floor()


@pytest.mark.parametrize("objective", ["save", "balanced", "restore", "stall"])
def test_a_tuning_is_judged_by_it(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, objective: str
) -> None:
    """The record beside its journal has saves only, and `iobench run` measures no stalls."""
    monkeypatch.setattr("platform.node", lambda: "node1")
    asked = TuningRequest(
        workload="llama7b",
        target=str(tmp_path),
        objective=objective,
        writers=["buffered"],
        size_bytes=128 * MIB,
        max_s=60.0,
        max_bytes=64 * GIB,
    )
    tuning = Tuning.of(asked)
    machine, storage = tuning.target.describe()
    path = write(
        environment=replace(RECORDED.run.environment, machine=machine, storage=storage),
        workload=replace(RECORDED.run.workload, bytes=tuning.actual_bytes(tuning.largest_bytes)),
    )
    judged = tuning.judged_by(tmp_path).asked
    if objective in ("save", "balanced"):
        assert (judged.floor, judged.floor_record) == (pytest.approx(0.2), str(path))
    else:
        assert (judged.floor, judged.floor_record) == (LEAST_FLOOR, None)
    assert tuning.judged_by(tmp_path / "none").asked == tuning.asked
