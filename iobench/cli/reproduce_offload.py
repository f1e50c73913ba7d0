"""`iobench reproduce sk-hynix-offload`: bytes and seconds of checkpoints of offloaded state."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from iobench.cli.given import check_effect, check_output, the_directory
from iobench.cli.report import check_report, write_report
from iobench.cli.train_optimizers import (
    make_comparison,
    measure_optimizers,
    raise_optimizer_differences,
)
from iobench.errors import UsageError
from iobench.report.render import DocumentFormat, write_grids, write_json

if TYPE_CHECKING:
    import typer

    from iobench.train.optimizer_record import OptimizerRecord

__all__ = ["reproduce_offload"]

_SCHEMA = "iobench.findings.offload/1"
_SIZE = "1GiB"
_STEPS = 2
_SMALLEST = 100_000
_NAMES = {"offload", "resident"}


def reproduce_offload(
    ctx: typer.Context,
    *,
    target: str,
    size: str | None,
    repeat: int,
    results: list[Path] | None,
    form: DocumentFormat,
    report: Path | None,
) -> None:
    """Train with offloaded and with resident state, restore both, and judge the claims."""
    if report is not None:
        check_report(report)
    if results:
        check_effect(ctx, ("target", "size", "repeat"), "--results measures nothing")
        record, path = _recorded(results)
    else:
        check_output(None, remedy="run it where results/ can be created")
        about = make_comparison(
            "offload,resident",
            target=the_directory(target),
            size=size or _SIZE,
            steps=_STEPS,
            repeat=repeat,
            model_params=_SMALLEST,
            memory="256MiB",
        )
        record, path = measure_optimizers(about, None, quiet=False)
    from iobench.claims.claims import OFFLOAD_CLAIMS
    from iobench.claims.offloaded import OFFLOAD_SOURCE, judge_offload
    from iobench.report.optimizers import claims_grid, heading, optimizer_grids

    findings = judge_offload(record.optimizers, record.state_bytes)
    if form is DocumentFormat.JSON:
        document = {
            "schema": _SCHEMA,
            "study": OFFLOAD_CLAIMS,
            "source": OFFLOAD_SOURCE,
            "state_bytes": record.state_bytes,
            "record": str(path),
            "findings": [asdict(one) for one in findings],
            "optimizers": record.to_json()["optimizers"],
        }
        write_json(document, sys.stdout)
    else:
        words = [f"{OFFLOAD_CLAIMS}: {OFFLOAD_SOURCE}", heading(record)]
        grids = [claims_grid(findings), *optimizer_grids(record)]
        write_grids(form, words, grids, [], sys.stdout)
    if report is not None:
        from iobench.report.page.optimizers_page import offload_claims_page

        write_report(lambda: offload_claims_page(path, record, findings), report)
    raise_optimizer_differences(record)


def _recorded(results: list[Path]) -> tuple[OptimizerRecord, Path]:
    """Return the record that was given. Raises UsageError unless it can be judged."""
    from iobench.train.optimizer_record import OptimizerRecord

    if len(results) > 1:
        raise UsageError("sk-hynix-offload judges one record; give --results once")
    (path,) = results
    record = OptimizerRecord.read(path)
    names = {one.name for one in record.optimizers} if record else set()
    if record is None or not names >= _NAMES:
        raise UsageError(
            f"{path}: not a record of iobench train --optimizer offload,resident; give one"
        )
    return record, path
