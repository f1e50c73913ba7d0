"""Checks of all samples in a record of several processes."""

from iobench.results import ResultFile


def check_samples(record: ResultFile) -> None:
    """Each is cold, verified, and moved what the header says of its axes."""
    expected = {(one.operation, one.axes): one.bytes for one in record.run.variants}
    for one in record.samples:
        assert one.bytes == expected[one.operation, one.axes]
        assert 0 < one.first_done_s <= one.last_done_s == one.elapsed_s
        assert (one.first_done_s < one.last_done_s) == (one.axes.numjobs > 1)
        assert len(one.jobs_done_s) == (one.axes.numjobs if one.axes.numjobs > 1 else 0)
        sizes = one.jobs_bytes or (one.bytes,) * len(one.jobs_done_s)
        busy = [at for at, size in zip(one.jobs_done_s, sizes, strict=True) if size]
        assert min(busy, default=one.first_done_s) == one.first_done_s
        if one.operation == "restore":
            assert one.cold.resident_fraction <= 0.01
            assert one.verified.mismatches == 0
