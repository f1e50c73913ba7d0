"""`iobench reproduce sk-hynix-offload`: bytes and seconds of checkpoints of offloaded state."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

from iobench.cli.train_optimizers import (
    make_comparison,
    measure_optimizers,
    raise_optimizer_differences,
)
from iobench.errors import UsageError
from iobench.report.render import DocumentFormat, write_grids, write_json

__all__ = ["reproduce_offload"]

_SCHEMA = "iobench.findings.offload/1"
_SIZE = "1GiB"
_STEPS = 2
_SMALLEST = 100_000


def reproduce_offload(
    *, target: Path, size: str | None, repeat: int, records: bool, form: DocumentFormat
) -> None:
    """Train with offloaded and with resident state, restore both, and judge the claims."""
    if records:
        raise UsageError("sk-hynix-offload has no records; leave out --results and --report")
    about = make_comparison(
        "offload,resident",
        target=target,
        size=size or _SIZE,
        steps=_STEPS,
        repeat=repeat,
        model_params=_SMALLEST,
        memory="256MiB",
    )
    found = measure_optimizers(about, quiet=False)
    from iobench.claims.offloaded import OFFLOAD_CLAIMS, OFFLOAD_SOURCE, judge_offload
    from iobench.report.grid import Grid
    from iobench.report.optimizers import heading, optimizer_grids

    findings = judge_offload(found, about.size_bytes)
    if form is DocumentFormat.JSON:
        document = {
            "schema": _SCHEMA,
            "study": OFFLOAD_CLAIMS,
            "source": OFFLOAD_SOURCE,
            "state_bytes": about.size_bytes,
            "findings": [asdict(one) for one in findings],
            "optimizers": [asdict(one) for one in found],
        }
        write_json(document, sys.stdout)
    else:
        answers = Grid(
            columns=(("claim", False), ("here", True), ("holds", False), ("why", False)),
            rows=[[one.text, one.ours, one.answer.value, one.reason] for one in findings],
            sentences=(3, 0),
        )
        words = [f"{OFFLOAD_CLAIMS}: {OFFLOAD_SOURCE}", heading(about)]
        grids = [answers, *optimizer_grids(about, found)]
        write_grids(form, words, grids, [], sys.stdout)
    raise_optimizer_differences(found)
