"""Summaries have exact figures in a fixed order, and every key of the document."""

from dataclasses import replace
from itertools import chain

import pytest

from iobench.bench.judging.ceiling import Ceiling, why_above
from iobench.report.run import grid, notes
from iobench.report.summary import summarise
from iobench.results import CeilingSample, MemoryUse, ResultFile, Sample, to_plain
from iobench.stats.comparison import compare_paired
from iobench.writers.transfer import Fallback

GIB, MIB = 2**30, 2**20


def only(example: ResultFile, writer: str, operation: str) -> list[Sample]:
    return [s for s in example.samples if (s.writer, s.operation) == (writer, operation)]


def job(name: str, operation: str, elapsed_s: float, error: str | None = None) -> CeilingSample:
    return CeilingSample(
        run_id="r",
        repetition=1,
        order=0,
        job={"name": name},
        operation=operation,
        bytes=GIB,
        elapsed_s=elapsed_s,
        cpu_s=None,
        error=error,
    )


def test_saves_come_first_each_operation_fastest_first(example: ResultFile) -> None:
    report = summarise(example)
    assert [(one.operation, one.writer) for one in report.summaries] == [
        ("save", "odirect"),
        ("save", "buffered"),
        ("restore", "odirect"),
        ("restore", "buffered"),
    ]


def test_figures_of_a_summary_by_hand(example: ResultFile) -> None:
    save = summarise(example).summaries[0]
    assert save.samples == 3
    assert save.bytes == GIB
    assert save.median_bytes_per_s == 2 * GIB  # of 2.5, 2.0 and 1.6
    assert save.ci95_bytes_per_s == (GIB / 0.625, GIB / 0.4)
    assert save.of_ceiling == 1.0
    assert save.cpu_s_per_gib == pytest.approx((0.5 + 0.4 + 0.625) / 4 / 3)
    assert save.phases_s == {"gather": 0.125, "write": 0.25, "sync": 0.0625, "commit": 0.0625}
    assert save.paths == {"direct": 192, "buffered": 3}
    assert (save.first_done_s, save.last_done_s) == (0.5, 0.5)
    assert save.verdict == "VALID (scaled)"
    assert save.reasons == ("scaled: 2 of 32 layers",)


def test_the_document_has_the_promised_keys(example: ResultFile) -> None:
    document = to_plain(summarise(example))
    assert list(document) == [
        *("schema", "environment", "workload", "ceiling", "baseline", "summaries", "winners"),
        *("failures", "record", "target", "stopped"),
    ]
    assert document["schema"] == "iobench.report/1"
    assert document["summaries"][0]["ci95_bytes_per_s"] == [GIB / 0.625, GIB / 0.4]


def test_one_sample_has_no_interval_and_says_so(example: ResultFile) -> None:
    few = [s for s in example.samples if s.repetition == 1]
    for one in summarise(replace(example, samples=tuple(few))).summaries:
        assert one.ci95_bytes_per_s is None
        assert "1 sample: no interval" in one.reasons


def test_the_ceiling_is_the_best_median_of_a_job(example: ResultFile) -> None:
    jobs = (
        job("steady", "save", 0.5),
        job("steady", "save", 0.5),
        job("steady", "save", 0.5),
        job("lucky", "save", 0.1),
        job("lucky", "save", 1.0),
        job("lucky", "save", 1.0),
        job("broken", "restore", 0.1, "fio: engine not loadable"),
    )
    ceiling = summarise(replace(example, ceiling=jobs)).ceiling
    assert ceiling.save_bytes_per_s == 2 * GIB
    assert ceiling.save_job == {"name": "steady"}
    assert ceiling.restore_bytes_per_s is None
    assert ceiling.restore_job is None
    assert ceiling.reason == "restore: fio: engine not loadable"


def test_without_a_ceiling_there_is_no_ratio_but_a_reason(example: ResultFile) -> None:
    report = summarise(replace(example, ceiling=()))
    assert report.ceiling.reason == "no fio job ran"
    assert {one.of_ceiling for one in report.summaries} == {None}


def test_a_fallback_is_listed_once_and_never_lost(example: ResultFile) -> None:
    fallback = Fallback(wanted="direct", used="buffered", reason="EINVAL")
    saves = only(example, "odirect", "save")
    fell = tuple(replace(s, fallbacks=(fallback,)) for s in saves[:2])
    restores = only(example, "odirect", "restore")
    one = summarise(replace(example, samples=(*fell, saves[2], *restores))).summaries[0]
    assert one.fallbacks == (fallback,)
    assert "2 of 3 samples: wanted direct, used buffered: EINVAL" in one.reasons


def test_an_outlier_is_flagged_and_counted(example: ResultFile) -> None:
    save = only(example, "odirect", "save")[0]
    times = (0.50, 0.51, 0.49, 0.50, 0.52, 5.0)
    samples = tuple(replace(save, elapsed_s=t, repetition=i) for i, t in enumerate(times, 1))
    one = summarise(replace(example, samples=samples)).summaries[0]
    assert one.samples == 6
    assert "repetition 7 is an outlier, and is counted (0.20 GiB/s (0.21 GB/s))" in one.reasons


def test_twins_of_an_aa_run_count_as_one(example: ResultFile) -> None:
    """One twin takes three times as long: both move twice the bytes in four times the time."""
    saves = only(example, "odirect", "save")
    twins = [replace(s, order=9, elapsed_s=3 * s.elapsed_s) for s in saves]
    against = [replace(s, setting=replace(s.setting, writer="buffered")) for s in saves]
    for mixed in ((*saves, *twins), (*twins, *saves)):
        found = compare_paired(mixed, against)
        assert found is not None
        assert (found.ratio.ratio, found.ratio.samples) == (pytest.approx(1 / 2), 3)
        inverse = compare_paired(against, mixed)
        assert inverse is not None
        assert inverse.ratio.ratio == pytest.approx(2)


def test_the_steady_state_is_of_repetitions_and_not_of_twins(example: ResultFile) -> None:
    """Each repetition takes 2 s for two very different samples; the last five repetitions are
    equal."""
    save = only(example, "odirect", "save")[0]
    times = [(0.4, 1.6), (1.6, 0.4)] * 2
    samples = tuple(
        replace(save, elapsed_s=t, repetition=number)
        for number, pair in enumerate([*times, (1.0, 1.0)], 1)
        for t in pair
    )
    for some in (samples, samples[:6]):
        one = summarise(replace(example, samples=some)).summaries[0]
        assert not [reason for reason in one.reasons if "steady" in reason]


def test_an_aa_run_that_is_too_short_for_a_floor_says_so(example: ResultFile) -> None:
    saves = only(example, "odirect", "save")
    other = [replace(s, setting=replace(s.setting, writer="buffered")) for s in saves]
    report = summarise(replace(example, samples=(*saves, *saves, *other)))
    short = [("A/A of fewer than 5 repetitions: no floor" in s.reasons) for s in report.summaries]
    assert dict(zip([s.writer for s in report.summaries], short, strict=True)) == {
        "odirect": True,
        "buffered": False,
    }
    save = saves[0]
    long = tuple(replace(save, repetition=number) for number in range(5)) * 2
    (one,) = summarise(replace(example, samples=long)).summaries
    assert not [reason for reason in one.reasons if "A/A" in reason]


def test_memory_is_the_median_of_both_parts(example: ResultFile) -> None:
    """It has a column where a record has it; there is no sum if a part is unknown."""
    assert summarise(example).summaries[0].memory is None
    parts = [(5, 100), (40, None), (3, 300)]
    uses = [MemoryUse(process_bytes=one * MIB, page_cache_bytes=two) for one, two in parts]
    given = iter(uses)
    samples = tuple(
        replace(one, memory=next(given))
        if (one.writer, one.operation) == ("odirect", "save")
        else one
        for one in example.samples
    )
    report = summarise(replace(example, samples=samples))
    save, *others = report.summaries
    assert save.memory == MemoryUse(process_bytes=5 * MIB, page_cache_bytes=200)
    assert save.memory.total_bytes == 5 * MIB + 200
    assert all(one.memory is None for one in others)
    assert replace(save.memory, page_cache_bytes=None).total_bytes is None
    at = [one.name for one in grid(report).columns].index("memory")
    assert {row[at] for row in grid(report).rows} == {"5.00 MiB", "-"}
    assert any(note.startswith("memory: the most") for note in [*chain(*notes(report))])


def _above(example: ResultFile, plan: dict[str, object], **job: object) -> list[str]:
    """The notes on rates above fio's in the example, whose fio is three times slower there."""
    slow = [
        replace(one, elapsed_s=3 * one.elapsed_s, job={**one.job, **job}) for one in example.ceiling
    ]
    run = replace(example.run, plan={**example.run.plan, **plan})
    rows = summarise(replace(example, run=run, ceiling=tuple(slow))).summaries
    assert all(one.of_ceiling and one.of_ceiling > 1.05 for one in rows)
    return [why for one in rows for why in one.reasons if why.startswith("above fio: ")]


def test_a_rate_above_fio_has_its_reason(example: ResultFile) -> None:
    """fio is no ceiling: what may explain a higher rate is said, and nothing is said below 105%."""
    rows = summarise(example).summaries
    assert all(one.of_ceiling and one.of_ceiling <= 1.05 for one in rows)
    assert not any(why.startswith("above fio") for one in rows for why in one.reasons)
    unique = {"pool_bytes": 2 * example.run.workload.bytes}
    small, repeating = "fio's buffers are in small pages", "fio's buffers repeat"
    save, _, restore, _ = _above(example, unique)
    assert save == f"above fio: {small}; {repeating}"
    assert restore.startswith(f"above fio: {small}")
    assert repeating not in restore
    save, *_ = _above(example, {"pool_bytes": 4096}, huge_pages=True, refill_buffers=True)
    assert save == "above fio: the data repeat"
    save, *_ = _above(example, unique, huge_pages=True, refill_buffers=True)
    assert save == "above fio: fio's four jobs are not the fastest that is possible here"


def test_a_rate_that_may_be_that_of_fio(example: ResultFile) -> None:
    """The note has the interval if it reaches down to fio's rate."""
    rate, low = 2 * GIB, GIB
    ceiling = Ceiling(save_bytes_per_s=1.6 * GIB, save_job={})
    why = why_above(example.run, ceiling, "save", rate, (low, 2.4 * GIB))
    assert why == "above fio: not shown, the interval is 62% to 150%"
