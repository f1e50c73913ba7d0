"""The claims of SK hynix's checkpoint-offloading SSD, judged by an OptimizerComparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from iobench.bench.judging.comparison import LEAST_SAMPLES
from iobench.bench.judging.stats import median, paired_log_ratio
from iobench.claims.answer import few_pairs
from iobench.claims.claims import Answer
from iobench.train.optimizer_record import STATE_BYTES, MeasuredOptimizer, MeasuredRestore

__all__ = ["OFFLOAD_SOURCE", "OffloadFinding", "judge_offload"]

OFFLOAD_SOURCE = (
    "SK hynix on a checkpoint-offloading SSD (slides, no figures): the drive keeps P32, M32 and V32"
)
_PARAMETER_BYTES = 2
_SLACK = 0.05
"""Bytes beside the parameters: padding to whole blocks, headers and records."""
_NOTHING = 0.01
"""Part of the state: the record of a pin."""


@dataclass(frozen=True, kw_only=True)
class OffloadFinding:
    """One claim, our figure, and whether it holds here."""

    text: str
    ours: str
    answer: Answer
    reason: str


def judge_offload(found: Sequence[MeasuredOptimizer], state_bytes: int) -> list[OffloadFinding]:
    """Return a finding for each claim. `found` has `offload` and `resident`."""
    by_name = {one.name: one for one in found}
    offload, resident = by_name["offload"], by_name["resident"]
    findings = [_checkpoint(offload, state_bytes), _restore_bytes(offload, state_bytes)]
    for method in ("checkpointer", "torch-save"):
        full = [one for one in resident.restores if one.method == method]
        findings.append(_sooner(offload.restores, full, method))
    return findings


def _checkpoint(offload: MeasuredOptimizer, state_bytes: int) -> OffloadFinding:
    written = median([one.written_bytes for one in offload.checkpoints])
    holds = written <= _NOTHING * state_bytes
    return OffloadFinding(
        text="a checkpoint transfers no optimizer state",
        ours=f"{written:,.0f} B of {state_bytes:,} B ({written / state_bytes:.3%})",
        answer=Answer.YES if holds else Answer.NO,
        reason="a pin writes a record, and its state is in place"
        if holds
        else f"more than {_NOTHING:.0%} of the state",
    )


def _restore_bytes(offload: MeasuredOptimizer, state_bytes: int) -> OffloadFinding:
    """Judge by the device's counter; by the process's own where there is no device."""
    least = state_bytes * _PARAMETER_BYTES / STATE_BYTES
    own = median([one.read_bytes for one in offload.restores])
    counted = [one.device_bytes for one in offload.restores if one.device_bytes is not None]
    read = median(counted) if counted else own
    counter = "the device's counter" if counted else "the process's counter; there is no device"
    if read <= least * (1 + _SLACK):
        answer, reason = Answer.YES, f"2 of 14 bytes by {counter}"
    elif own <= least * (1 + _SLACK):
        answer = Answer.UNDECIDED
        reason = f"this process read {own / state_bytes:.1%}; others use the device too"
    else:
        answer, reason = Answer.NO, f"2 of 14 bytes are {least / state_bytes:.1%}"
    return OffloadFinding(
        text="a restore reads the parameters only",
        ours=f"{read:,.0f} B of {state_bytes:,} B ({read / state_bytes:.1%})",
        answer=answer,
        reason=reason,
    )


def _sooner(
    ours: Sequence[MeasuredRestore], full: Sequence[MeasuredRestore], method: str
) -> OffloadFinding:
    ratio = paired_log_ratio([one.elapsed_s for one in full], [one.elapsed_s for one in ours])
    interval = ratio.interval
    if ratio.samples < LEAST_SAMPLES or interval is None:
        answer, reason = Answer.UNDECIDED, few_pairs(ratio.samples)
    elif interval.low > 1:
        answer, reason = Answer.YES, "the whole interval is above 1"
    elif interval.high < 1:
        answer, reason = Answer.NO, "the whole interval is below 1"
    else:
        answer, reason = Answer.UNDECIDED, "1 is within the interval"
    spread = f" ({interval.low:.2f}x to {interval.high:.2f}x)" if interval else ""
    return OffloadFinding(
        text=f"training starts sooner than after a full load ({method})",
        ours=f"{ratio.ratio:.2f}x{spread}",
        answer=answer,
        reason=reason,
    )
