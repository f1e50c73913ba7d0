"""`iobench reproduce`: measure a published claim here, and report whether it holds."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from iobench.cli.given import (
    HERE,
    ReportFormatOption,
    check_effect,
    check_output,
    preparing,
    print_plan,
    read_record,
    the_directory,
)
from iobench.cli.pages import Shown

if TYPE_CHECKING:
    from iobench.claims.claims import Claim, Study
    from iobench.results import ResultFile


_TRAINED = "1GiB"
_INTERVALS = 3  # of checkpoints, in a block
_STEPS = 12  # of a block, at least, if it measures the interval first
_SMALLEST = 100_000  # parameters: its own forward and backward must fit into the simulated step


def reproduce(
    ctx: typer.Context,
    claim: str,
    target: str = HERE,
    size: str | None = None,
    repeat: int = 7,
    results: list[Path] | None = None,
    format_: ReportFormatOption = "table",
) -> None:
    """Measure a published claim, and report whether it holds here.

    Answers are yes, no, undecided (the claim is within our interval) and not comparable, each
    with its reason and setting. hybrid-io compares writer hybrid with buffered, by files and by the
    wall clock of training; checkfreq and pccheck compare training with and without checkpoints;
    async compares stalls. A step is the published one, scaled as its checkpoint is.

    Arguments:
        CLAIM: The claim: hybrid-io, checkfreq, pccheck, async.

    Options:
        --target TARGET: The directory to measure in. [here]
        --size SIZE: Scale each workload to this many bytes. Default: what fits and takes about 90
            seconds; 1GiB for training.
        --repeat N: Samples, or blocks of training, of each side.
        --results FILE: Measure nothing; judge this record. May be given several times.
    """
    if results:
        why = "--results measures nothing"
        check_effect(ctx, ("target", "size", "repeat"), why)
    else:
        check_output(None, remedy="run it where results/ can be created")
    the_directory(target)
    shown = Shown(form=format_)
    with preparing("reading the claims"):
        from iobench.claims.claims import study
        from iobench.claims.reproduction import judge_records
        from iobench.cli.run import raise_failures
        from iobench.cli.train import raise_differences
        from iobench.report.claims import claims_document

        about = study(claim)
    records = [*map(read_record, results or ())] or _measured(about, target, size, repeat)
    found = judge_records(about, records)
    document = claims_document(about, records, found)
    shown.show(document)
    for record in records:
        raise_failures(record)
        raise_differences(record)


def _measured(about: Study, target: str, size: str | None, repeat: int) -> list[ResultFile]:
    """Measure each workload and return the records: files if a claim needs them, then training."""
    records = []
    for workload in about.workloads:
        if claims := about.of(workload, files=True):
            records.append(_files(claims, target, size, repeat))
            print(f"record: {records[-1].path}", file=sys.stderr)
        if claims := about.of(workload, files=False):
            records.append(_training(about, claims, target, size or _TRAINED, repeat))
            print(f"record: {records[-1].path}", file=sys.stderr)
    return records


def _files(claims: Sequence[Claim], target: str, size: str | None, repeat: int) -> ResultFile:
    from iobench.bench.planning import make_plan, plan_lines
    from iobench.cli.run import measure
    from iobench.results import default_path

    plan = make_plan(
        workload=claims[0].workload,
        writers=",".join(side.split()[0] for side in (claims[0].theirs, claims[0].ours)),
        target=target,
        size=size,
        repeat=repeat,
        ceiling=False,
    )
    print_plan(plan_lines(plan))
    return measure(plan, default_path(plan.workload.name))


def _training(
    about: Study, claims: Sequence[Claim], target: str, size: str, repeat: int
) -> ResultFile:
    from iobench.cli.train import measure_training
    from iobench.results import default_path
    from iobench.train.arm import arm_of
    from iobench.train.pace import whole_intervals
    from iobench.train.session import make_session

    sides = dict.fromkeys(side for claim in claims for side in (claim.theirs, claim.ours))
    session = make_session(
        workload=claims[0].workload,
        arms=[arm_of(side) for side in sides],
        target=Path(target),
        size=size,
        steps=whole_intervals(_INTERVALS * int(about.every), int(about.every))
        if about.every.isdecimal()
        else _STEPS,
        every=about.every,
        intervals=0 if about.every.endswith("%") else _INTERVALS,
        repeat=repeat,
        model_params=_SMALLEST,
        simulate_step=True,
        scale_step=True,
    )
    return measure_training(session, default_path(f"train-{session.workload.name}"))
