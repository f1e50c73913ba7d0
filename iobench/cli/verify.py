"""`iobench verify`: whether checkpoints are whole, by their checksums, sizes and indexes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from iobench.cli.given import FormatOption
from iobench.cli.progress import VerifyProgress
from iobench.errors import DataMismatchError, UsageError
from iobench.report.render import write_json
from iobench.text import printable, printable_values
from iobench.units import count_of, format_rate, format_seconds, format_size

if TYPE_CHECKING:
    from iobench.verification.inventory import VerifyReport

_SHOWN = 8  # files without checksums, of each reason


def verify(
    paths: list[str],
    record: bool = False,
    against: str | None = None,
    values: bool = False,
    writer: str | None = None,
    format_: FormatOption = "table",
) -> None:
    """Check that checkpoints are whole; exit code 4 if they are not.

    Reads every byte once, compares the checksums that there are, and says where there are none.
    Nothing is unpickled that could run code.

    Arguments:
        PATH...: Files, directories or s3://bucket/prefix, of any format.

    Options:
        --record: Write iobench-verify.json with the XXH3-64 of every tensor; later runs compare.
        --against OTHER: Compare tensor by tensor with this checkpoint, of any format.
        --values: Count NaN, infinities and tensors of zeros.
        --writer WRITERS: Reads: a writer or writer.toml. [hybrid; s3 in a bucket]
    """
    from iobench.verification.verify import verify as verify_path
    from iobench.verification.verify import verify_against

    if against is not None and (len(paths) > 1 or record):
        raise UsageError("--against compares one PATH with OTHER, without --record")
    reports: dict[str, VerifyReport] = {}
    for path in paths:
        with VerifyProgress(path) as progress:
            if against is not None:
                reports[path] = verify_against(
                    path, against, writer=writer, values=values, progress=progress.read
                )
            else:
                reports[path] = verify_path(
                    path, writer=writer, record=record, values=values, progress=progress.read
                )
        if format_ == "table":
            _print(path, reports[path])
    if format_ == "json":
        from iobench.results.codec import to_plain

        listed = [{"path": path, "ok": one.ok, **to_plain(one)} for path, one in reports.items()]
        found = printable_values({"schema": "iobench.verify/1", "reports": listed})
        write_json(found, sys.stdout)
    errors = sum(len(one.errors) for one in reports.values())
    if errors:
        bad = ", ".join(path for path, one in reports.items() if not one.ok)
        raise DataMismatchError(f"{bad}: {count_of(errors, 'error')}")


def _print(path: str, report: VerifyReport) -> None:
    rate = format_rate(report.size_bytes / max(report.elapsed_s, 1e-9))
    print(
        f"{printable(path)}: {', '.join(report.kinds) or 'recorded files'}; "
        f"{count_of(report.files, 'file')}, {count_of(report.tensors, 'tensor')}, "
        f"{format_size(report.size_bytes)} in {format_seconds(report.elapsed_s)}, {rate}"
    )
    for finding in report.findings:
        print(f"  {finding.severity:<8} {finding}")
    by_reason: dict[str, list[str]] = {}
    for file, why in report.unproved.items():
        by_reason.setdefault(why, []).append(file)
    for why, files in by_reason.items():
        more = f" and {len(files) - _SHOWN} more" if len(files) > _SHOWN else ""
        print(f"  unproved {printable(', '.join(files[:_SHOWN]) + more + ': ' + why)}")
    if report.values is not None:
        found = report.values
        zeros = count_of(found["zero_tensors"], "tensor")
        print(f"  values   {found['nan']} NaN, {found['inf']} infinite, {zeros} of zeros")
    result = "whole" if report.ok else f"damaged: {count_of(len(report.errors), 'error')}"
    print(f"  result   {result}")
