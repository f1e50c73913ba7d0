"""The rules for VALID, VALID (scaled) and INVALID, one by one."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from iobench.bench.judging.verdict import (
    Context,
    Verdict,
    VerdictStatus,
    combine,
    judge,
    with_verification,
)
from iobench.environment import Storage
from iobench.results import (
    Cold,
    DeviceCounts,
    MemoryUse,
    ResultFile,
    Sample,
    Stored,
    VariantFacts,
    Verified,
    read,
)
from iobench.results.records import BackgroundRestores
from iobench.writers.transfer import Fallback, PathCount

EXAMPLE: ResultFile = read(Path(__file__).parents[1] / "results" / "example.jsonl")
SIZE = EXAMPLE.run.workload.bytes
FULL = Context(workload_bytes=SIZE)
SAMPLES = with_verification(EXAMPLE.samples, FULL)
SAVE = next(sample for sample in SAMPLES if sample.operation == "save")
RESTORE = next(sample for sample in SAMPLES if sample.operation == "restore")
GOOD = Verified(tensors=20, bytes=SIZE, mismatches=0)


def moved(*, read: int | None, write: int | None, process_write: int | None = SIZE) -> DeviceCounts:
    return DeviceCounts(
        read_bytes=read,
        write_bytes=write,
        process_read_bytes=None,
        process_write_bytes=process_write,
    )


def moved_all(*, read: int) -> DeviceCounts:
    """All bytes by the process's counter, `read` of them by the device's."""
    return replace(moved(read=read, write=0), process_read_bytes=SIZE)


def stored(*, problems: tuple[str, ...] = (), unsynced: int | None = 0, unseen: str = "") -> Stored:
    return Stored(problems=problems, unsynced_bytes=None if unseen else unsynced, unseen=unseen)


def cold(fraction: float) -> Cold:
    return Cold(
        resident_bytes=int(fraction * SIZE),
        resident_fraction=fraction,
        method="cachestat",
        dropped_caches=False,
    )


def reasons(verdict: Verdict) -> list[str]:
    return [str(reason) for reason in verdict.reasons]


@pytest.mark.parametrize("sample", [SAVE, RESTORE])
def test_a_proper_sample_is_valid_without_reasons(sample: Sample) -> None:
    assert judge(sample, FULL) == Verdict(status=VerdictStatus.VALID)


def test_a_smaller_workload_is_valid_scaled_and_says_how() -> None:
    verdict = judge(SAVE, Context(workload_bytes=SIZE, scale="2 of 32 layers"))
    assert verdict.status is VerdictStatus.SCALED
    assert reasons(verdict) == ["scaled: 2 of 32 layers"]


@pytest.mark.parametrize(
    ("sample", "reason"),
    [
        (
            replace(RESTORE, cold=cold(0.0101)),
            "not cold: more than 1% was still in the page cache (1.01%)",
        ),
        (replace(RESTORE, cold=None), "not proved cold: the page cache was not looked at"),
        (replace(RESTORE, verified=None), "not verified: no valid restore compared these bytes"),
        (replace(SAVE, verified=None), "not verified: no valid restore compared these bytes"),
        (
            replace(RESTORE, verified=replace(GOOD, mismatches=2)),
            "wrong bytes: tensors differ from what was saved (2 of 20)",
        ),
        (
            replace(SAVE, verified=replace(GOOD, mismatches=20)),
            "wrong bytes: tensors differ from what was saved (20 of 20)",
        ),
        (
            replace(SAVE, bytes=SIZE - 1),
            f"moved another number of bytes than the workload has ({SIZE - 1} of {SIZE} bytes)",
        ),
        (
            replace(SAVE, device=moved(read=0, write=SIZE // 2, process_write=SIZE // 4)),
            "the bytes did not reach the device (50% of them)",
        ),
        (
            replace(RESTORE, device=moved(read=SIZE // 10, write=0)),
            "the bytes did not come from the device (10% of them)",
        ),
        (
            replace(SAVE, device=moved(read=0, write=SIZE // 20)),
            "the bytes did not reach the device (5% of them by its counter)",
        ),
        (
            replace(SAVE, device=moved(read=0, write=SIZE // 2), stored=stored(unseen="no pages")),
            "the bytes did not reach the device (50% of them by its counter; no pages)",
        ),
        (
            replace(RESTORE, device=replace(RESTORE.device, process_read_bytes=SIZE // 20)),
            "the bytes did not come from the device (5% of them by this process)",
        ),
        (
            replace(RESTORE, device=moved_all(read=SIZE // 20)),
            "the bytes did not come from the device (5% of them by its counter)",
        ),
        (
            replace(SAVE, stored=replace(stored(), flushed=False)),
            "not durable: the writer returned before the device flushed its cache",
        ),
        (
            replace(SAVE, durable=False),
            "not durable: the writer itself reports that it did not sync",
        ),
        (
            replace(SAVE, stored=stored(unsynced=8192)),
            "not durable: dirty pages were left after the save (8192 bytes)",
        ),
        (
            replace(SAVE, stored=stored(problems=("a is missing", "b is a symbolic link"))),
            "files are not as saved (a is missing, b is a symbolic link)",
        ),
        (
            replace(RESTORE, stored=stored(problems=("a is missing",))),
            "files are not as saved (a is missing)",
        ),
        (
            replace(RESTORE, elapsed_s=1.0, phases_s={"read": 0.7, "scatter": 0.5}),
            "phases that its time cannot hold (read 0.7 s, scatter 0.5 s in 1 s)",
        ),
        (
            replace(RESTORE, elapsed_s=1.0, phases_s={"read": 0.7, "scatter": -0.1}),
            "phases that its time cannot hold (read 0.7 s, scatter -0.1 s in 1 s)",
        ),
        (
            replace(SAVE, elapsed_s=1.0, phases_s={"write": math.inf}),
            "phases that its time cannot hold (write inf s in 1 s)",
        ),
        (
            replace(SAVE, paths={"direct": PathCount(operations=2, bytes=SIZE // 2)}),
            f"its paths do not add up to the bytes moved ({SIZE // 2} of {SIZE} bytes)",
        ),
        (
            replace(SAVE, paths={"direct": PathCount(operations=2, bytes=2 * SIZE)}),
            f"its paths do not add up to the bytes moved ({2 * SIZE} of {SIZE} bytes)",
        ),
        (replace(SAVE, stores=False), "stores nothing: this is the harness's own speed"),
    ],
)
def test_what_makes_a_figure_invalid(sample: Sample, reason: str) -> None:
    verdict = judge(sample, Context(workload_bytes=SIZE, scale="smaller"))
    assert verdict.status is VerdictStatus.INVALID
    assert reasons(verdict)[0].startswith(reason)


@pytest.mark.parametrize(
    "sample",
    [
        replace(RESTORE, cold=cold(0.01)),
        replace(SAVE, cold=None),
        replace(RESTORE, device=moved(read=-(-99 * SIZE // 100), write=0)),
        replace(SAVE, device=moved(read=0, write=-(-99 * SIZE // 100), process_write=SIZE)),
        replace(SAVE, stored=stored()),
        replace(SAVE, stored=stored(unseen="no pages")),  # the device has all of them
        replace(RESTORE, stored=stored(unsynced=4096), durable=False),  # of a save only
        replace(SAVE, elapsed_s=1.0, phases_s={"serialize": 0.9, "wait": 0.2, "write": 1.1}),
        replace(SAVE, paths={"direct": PathCount(operations=2, bytes=SIZE + 2 * 4095)}),
        replace(SAVE, paths={}),
    ],
)
def test_the_limits_themselves_are_allowed(sample: Sample) -> None:
    assert judge(sample, FULL) == Verdict(status=VerdictStatus.VALID)


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        (
            replace(SAVE, device=None),
            [
                "not checked against the device's own counter: there is none",
                "not checked against the process's own counter: there is none",
            ],
        ),
        (
            replace(RESTORE, device=None),
            ["not checked against the device's own counter: there is none"],
        ),
        (
            replace(SAVE, device=moved(read=0, write=SIZE // 2)),
            ["the device's own counter saw less than was moved (50%)"],
        ),
        (
            replace(SAVE, device=moved(read=None, write=None, process_write=0)),
            [
                "the process's own counter saw less than was moved (0%)",
                "not checked against the device's own counter: there is none",
            ],
        ),
        (
            replace(
                SAVE,
                fallbacks=(Fallback(wanted="uncached", used="buffered", reason="Linux 6.1"),),
                notes=("another process wrote",),
            ),
            ["wanted uncached, used buffered: Linux 6.1", "another process wrote"],
        ),
    ],
)
def test_notes_without_effect_on_the_verdict(sample: Sample, expected: list[str]) -> None:
    verdict = judge(sample, FULL)
    assert verdict.status is VerdictStatus.VALID
    assert reasons(verdict) == expected


def test_a_writer_that_stores_nothing_is_asked_nothing_else() -> None:
    null = replace(RESTORE, stores=False, cold=None, verified=None, device=None, bytes=1)
    assert len(judge(null, FULL).reasons) == 1


@pytest.mark.parametrize(
    "storage",
    [Storage(fs_type="tmpfs"), Storage(fs_type="overlay", upper=Storage(fs_type="tmpfs"))],
)
def test_the_context_of_a_full_run_in_memory(storage: Storage) -> None:
    run = replace(
        EXAMPLE.run,
        workload=replace(EXAMPLE.run.workload, scaled=False, scale=None),
        environment=replace(EXAMPLE.run.environment, storage=storage),
    )
    assert Context.of(run) == Context(workload_bytes=SIZE, volatile={None: "tmpfs"})


def test_the_worst_verdict_stands_and_reasons_are_counted() -> None:
    context = Context(workload_bytes=SIZE, scale="smaller")
    warm = [replace(RESTORE, cold=cold(part)) for part in (0.5, 0.2, 0.2, 0.3, 0.4)]
    verdict = combine([judge(sample, context) for sample in (RESTORE, *warm)])
    assert verdict.status is VerdictStatus.INVALID
    assert sorted(reasons(verdict)) == [
        "5 of 6 samples: not cold: more than 1% was still in the page cache (50%, 20%, 30%, ...)",
        "scaled: smaller",
    ]


def test_a_reason_twice_in_one_sample_counts_once() -> None:
    noted = judge(replace(SAVE, notes=("slow", "slow")), FULL)
    assert reasons(combine([noted, judge(SAVE, FULL)])) == ["1 of 2 samples: slow"]


def test_a_save_is_verified_by_the_restore_of_its_repetition() -> None:
    bad = replace(GOOD, mismatches=1)
    save = replace(SAVE, verified=None, repetition=1)
    given = [
        save,
        replace(save, repetition=2),
        replace(save, repetition=3),
        replace(save, setting=replace(save.setting, writer="other")),
        replace(RESTORE, setting=SAVE.setting, repetition=1, verified=GOOD),
        replace(RESTORE, setting=SAVE.setting, repetition=2, verified=bad),
    ]
    assert [sample.verified for sample in with_verification(given, FULL)] == [
        GOOD,
        bad,
        bad,
        None,
        GOOD,
        bad,
    ]


@pytest.mark.parametrize(
    "restore",
    [
        replace(RESTORE, cold=None),
        replace(RESTORE, cold=cold(0.5)),
        replace(RESTORE, device=moved(read=0, write=0)),
        replace(RESTORE, stored=stored(problems=("file is missing",))),
        replace(RESTORE, paths={"read": PathCount(operations=1, bytes=1)}),
    ],
)
def test_a_save_is_proved_by_a_valid_restore_only(restore: Sample) -> None:
    """Correct tensors that may come from memory prove nothing; wrong tensors disprove the save."""
    save = replace(SAVE, verified=None)
    own = replace(restore, setting=SAVE.setting, repetition=SAVE.repetition, verified=GOOD)
    bad = replace(GOOD, mismatches=1)
    assert [one.verified for one in with_verification([save, own], FULL)] == [None, GOOD]
    wrong = replace(own, verified=bad)
    assert [one.verified for one in with_verification([save, wrong], FULL)] == [bad, bad]


def test_a_file_system_in_memory_needs_no_cold_restore() -> None:
    """The page cache is its storage, and no page of it can be evicted."""
    context = Context(workload_bytes=SIZE, volatile={None: "tmpfs"})
    warm = replace(RESTORE, setting=SAVE.setting, cold=cold(1.0), device=None, verified=GOOD)
    save = replace(SAVE, verified=None, device=None, stored=stored(unseen="always dirty"))
    proved, _ = with_verification([save, warm], context)
    assert judge(proved, context).status is VerdictStatus.VALID
    assert "not durable: tmpfs" in reasons(judge(proved, context))


def some(part: int, *, repetition: int = 1, restore_as: str | None = "tp=2") -> Sample:
    """A restore of one tensor in twenty, which has `part`% of the bytes."""
    return replace(
        RESTORE,
        setting=SAVE.setting.at(restore_as=restore_as),
        repetition=repetition,
        bytes=part * SIZE // 100,
        paths={},
        verified=Verified(tensors=1, bytes=part * SIZE // 100, mismatches=0),
    )


def test_a_save_with_some_compared_tensors_has_a_note() -> None:
    """The other tensors were never read. A save that a full restore proves has no such note."""
    save = replace(SAVE, verified=None, repetition=1)
    partly, _ = with_verification([save, some(52)], FULL)
    assert judge(partly, FULL).status is VerdictStatus.VALID
    assert reasons(judge(partly, FULL)) == [
        "only the tensors of a restore of tp=2 were compared: 1 of them, 52% of the bytes"
    ]
    whole = replace(some(100, restore_as=None), verified=GOOD)
    for given in ([save, some(52), whole], [save, whole, some(52)]):
        assert with_verification(given, FULL)[0] == replace(save, verified=GOOD)


def test_a_restore_of_some_tensors_has_its_share_as_a_note() -> None:
    """The norms are in the part of every rank; of its own variant, if there are several."""
    restore = replace(some(52), device=moved(read=SIZE, write=0))
    expected = ["only some tensors were restored (52% of the bytes, tp=2 was asked)"]
    partly = Context(workload_bytes=SIZE, restored_bytes=restore.bytes)
    assert reasons(judge(restore, partly)) == expected
    variants = [
        VariantFacts(
            operation=operation,
            axes=restore.setting.at(restore_as=restore_as).axes,
            bytes=size,
            files=1,
        )
        for operation, restore_as, size in (
            ("save", None, SIZE),
            ("restore", "tp=2", restore.bytes),
        )
    ]
    assert reasons(judge(restore, Context(workload_bytes=1, variants=tuple(variants)))) == expected


BESIDE = BackgroundRestores(
    writer="odirect",
    restores=3,
    bytes=2 * SIZE,
    lead_s=0.01,
    lag_s=0.5,
    reading_s=0.9 * SAVE.elapsed_s,
    resident_fraction=0.0,
    from_storage=1.0,
    mismatches=0,
)


def beside(background: BackgroundRestores | None) -> Sample:
    setting = SAVE.setting.at(background="restore")
    device = moved(read=SIZE, write=SIZE)
    return replace(
        SAVE, setting=setting, verified=GOOD, device=device, background_restores=background
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"error": "it was ended by SIGKILL"}, "nothing was restored in the background (it was en"),
        ({"lead_s": -0.25}, "the restores in the background began within the save (250 ms of "),
        ({"lag_s": -0.25}, "the restores in the background ended within the save (250 ms of "),
        ({"mismatches": 2}, "the restores in the background brought back wrong bytes (2 tensors)"),
        ({"resident_fraction": 0.5}, "the restores in the background were not cold (50% in the p"),
        ({"from_storage": 0.01}, "the restores in the background did not come from storage (1% of"),
    ],
)
def test_a_background_that_was_not_there_makes_it_invalid(
    changes: dict[str, Any], expected: str
) -> None:
    verdict = judge(beside(replace(BESIDE, **changes)), FULL)
    assert verdict.status is VerdictStatus.INVALID
    assert any(text.startswith(expected) for text in reasons(verdict)), reasons(verdict)
    assert judge(beside(BESIDE), FULL).status is VerdictStatus.VALID


def test_a_background_that_was_there_for_a_part() -> None:
    assert judge(beside(None), FULL).status is VerdictStatus.INVALID
    paused = judge(beside(replace(BESIDE, reading_s=0.5 * SAVE.elapsed_s)), FULL)
    assert paused.status is VerdictStatus.UNPROVED
    assert reasons(paused)[0] == "the background restored only a part of the time (50%)"
    warm = judge(beside(replace(BESIDE, from_storage=0.5)), FULL)
    assert warm.status is VerdictStatus.VALID
    assert any("storage delivered only a part (50%)" in text for text in reasons(warm))
    uncounted = replace(beside(replace(BESIDE, from_storage=0.0)), device=None)
    assert not any("background" in text for text in reasons(judge(uncounted, FULL)))


@pytest.mark.parametrize(("axis", "value"), [("restore_mode", "all"), ("slices", "off")])
@pytest.mark.parametrize(("read", "invalid"), [(1.0, False), (0.5, True)])
def test_replicas_share_what_their_machine_read(
    axis: str, value: str, read: float, invalid: bool
) -> None:
    """Four processes restore the same bytes: the storage must have moved them once, not less."""
    setting = RESTORE.setting.at(**{axis: value, "numjobs": 4})
    sample = replace(
        RESTORE,
        setting=setting,
        bytes=4 * SIZE,
        verified=GOOD,
        paths={"buffered": PathCount(operations=4, bytes=4 * SIZE)},
        device=moved(read=int(read * SIZE), write=0),
    )
    context = replace(
        FULL,
        variants=(VariantFacts(operation="restore", axes=setting.axes, bytes=4 * SIZE, files=1),),
    )
    verdict = judge(sample, context)
    assert (verdict.status is VerdictStatus.INVALID) == invalid, verdict
    assert invalid == any("did not come from" in reason.text for reason in verdict.reasons)


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        (
            replace(SAVE, device=moved(read=None, write=None), stored=stored(unseen="no pages")),
            "not proved durable: no pages, and the device has no counter",
        ),
        (
            replace(RESTORE, device=replace(moved_all(read=SIZE), process_read_bytes=SIZE // 2)),
            "not proved cold: this process read a part of the bytes, the rest may be from memory "
            "(50%)",
        ),
    ],
)
def test_what_nothing_could_disprove_is_not_proved(sample: Sample, expected: str) -> None:
    """Neither valid nor invalid; scaled or not."""
    verdict = judge(sample, FULL)
    assert verdict.status is VerdictStatus.UNPROVED
    assert reasons(verdict)[0] == expected
    assert judge(sample, replace(FULL, scale="1 layer")).status is VerdictStatus.UNPROVED


@pytest.mark.parametrize("sample", [SAVE, RESTORE])
def test_ignored_syncs_make_everything_invalid(sample: Sample) -> None:
    ignored = replace(stored(), ignored_syncs="a library replaces fsync")
    verdict = judge(replace(sample, stored=ignored), FULL)
    assert verdict.status is VerdictStatus.INVALID
    assert reasons(verdict) == [
        "syncs are ignored here, so nothing is durable (a library replaces fsync)"
    ]


@pytest.mark.parametrize(
    ("cached", "paths", "valid"),
    [
        (SIZE, {"direct": SIZE}, False),
        (0, {"direct": SIZE}, True),
        (SIZE, {"buffered": SIZE}, True),
        (SIZE // 2, {"direct": SIZE // 2, "buffered": SIZE // 2}, True),
        (None, {"direct": SIZE}, True),
    ],
)
def test_direct_bytes_are_not_in_the_page_cache(
    cached: int | None, paths: dict[str, int], valid: bool
) -> None:
    counted = {name: PathCount(operations=1, bytes=part) for name, part in paths.items()}
    memory = MemoryUse(process_bytes=0, page_cache_bytes=cached)
    verdict = judge(replace(SAVE, paths=counted, memory=memory), FULL)
    assert (verdict.status is VerdictStatus.VALID) is valid


def test_data_that_repeat_are_named_and_invalidate_nothing() -> None:
    """The processes of a run share the memory for data: each repeats after its own part."""
    asked = {"pool_bytes": 4 * SIZE, "numjobs": [1, 4]}
    plan = replace(EXAMPLE.run, plan={**EXAMPLE.run.plan, **asked})
    assert Context.of(plan).repeats_every is None
    context = Context.of(replace(plan, plan={**plan.plan, "numjobs": [1, 8]}))
    assert context.repeats_every == SIZE // 2
    for sample in (SAVE, RESTORE):
        verdict = judge(sample, replace(FULL, repeats_every=16 * 2**20))
        assert (verdict.status, reasons(verdict)) == (
            VerdictStatus.VALID,
            ["data repeats every 16.00 MiB"],
        )


@pytest.mark.parametrize(
    ("size", "process", "status"),
    [
        (16, None, VerdictStatus.UNPROVED),
        (255, None, VerdictStatus.UNPROVED),
        (256, None, VerdictStatus.VALID),
        (16, 1.0, VerdictStatus.VALID),
        (16, 0.5, VerdictStatus.UNPROVED),
        (16, 0.05, VerdictStatus.INVALID),
    ],
)
def test_a_small_restore_does_not_lower_the_bar(
    size: int, process: float | None, status: VerdictStatus
) -> None:
    """The device's counter alone counts what other programs read; a few MiB are soon read."""
    moved_bytes = size * 2**20
    counts = DeviceCounts(
        read_bytes=moved_bytes,
        write_bytes=0,
        process_read_bytes=None if process is None else int(process * moved_bytes),
        process_write_bytes=0,
    )
    small = replace(RESTORE, bytes=moved_bytes, device=counts, paths={}, cold=cold(0.0))
    verdict = judge(small, Context(workload_bytes=moved_bytes))
    assert verdict.status is status, reasons(verdict)
    assert any("too small to prove" in why for why in reasons(verdict)) is (
        process is None and status is VerdictStatus.UNPROVED
    )
