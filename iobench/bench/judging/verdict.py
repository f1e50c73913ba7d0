"""Verdict: whether a figure is VALID, VALID (scaled), NOT PROVED or INVALID, and why.

The rules are those of an honest number (docs/results.md): cold and proved cold, verified, the bytes
on the device, the whole workload, something stored at all. Where the kernel shows nothing that
could prove a figure or disprove it, the figure is NOT PROVED. Facts that a reader needs (a
fallback, a note, a missing counter, a volatile target) are reasons that invalidate nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Self

from iobench.environment import Storage
from iobench.peers import PREFIX
from iobench.results.identity import contender_of
from iobench.results.records import DeviceCounts, Run, Sample, VariantFacts
from iobench.results.result_file import ResultFile
from iobench.units import KIB, MIB, format_seconds, format_size

RESIDENT_LIMIT = 0.01  # with a larger part of a file in the page cache, a restore is not cold
REACHED_LIMIT = 0.99  # with a smaller part at the device, the bytes did not reach it
NEAR_ZERO = 0.1  # with a smaller part by one counter, no other counter makes up for it
_CLOCK_SLACK, _CLOCK_SLACK_S = 0.1, 0.05  # by which phases may exceed the clock
_COUNTED_LEAST, _COUNTED_MOST = 0.99, 1.25  # limits for a writer's bytes by path over bytes moved
_PAST_THE_CACHE = {"direct", "gds"}
_LEAST_PROOF = 256 * MIB  # other programs hardly read more in the time of a restore
_MOSTLY = 0.8  # of the clock; a background that restores less of it is not the load it claims
_PADDING = 64 * KIB  # of one operation: the largest alignment of direct I/O
REPEATS = "data repeats every "
WRONG_BYTES = "wrong bytes: tensors differ from what was saved"
_VOLATILE = ("tmpfs", "ramfs")
_MOST_MEASURED = 3


class VerdictStatus(StrEnum):
    """From best to worst."""

    VALID = "VALID"
    SCALED = "VALID (scaled)"
    UNPROVED = "NOT PROVED"
    INVALID = "INVALID"
    FAILED = "FAILED"


@dataclass(frozen=True, kw_only=True)
class Reason:
    """A reason of a verdict. `measured` are its figures, `share` the samples that have it."""

    text: str
    measured: tuple[str, ...] = ()
    share: str = ""

    def __str__(self) -> str:
        shown = ", ".join(self.measured[:_MOST_MEASURED])
        more = ", ..." if len(self.measured) > _MOST_MEASURED else ""
        return (
            (f"{self.share}: " if self.share else "")
            + self.text
            + (f" ({shown}{more})" if shown else "")
        )


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """`status` with its reasons, those that invalidate first."""

    status: VerdictStatus
    reasons: tuple[Reason, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Context:
    """The facts to judge a sample by: the workload's bytes, and facts that may be absent.

    `restored_bytes` are the bytes of a restore that reads only a part of them. `variants` give the
    bytes of samples with their axes; other samples move the workload's bytes. `scale` says how the
    workload was scaled down. `volatile` names the file system that is held in memory below each
    target, None for the only one.
    """

    workload_bytes: int
    restored_bytes: int | None = None
    variants: tuple[VariantFacts, ...] = ()
    scale: str | None = None
    volatile: Mapping[str | None, str | None] = field(default_factory=dict)
    repeats_every: int | None = None
    """After how many bytes the data repeat; see `repeats_every`."""

    @classmethod
    def of(cls, run: Run) -> Self:
        """Return the context from the header of a result file."""
        return cls(
            workload_bytes=run.workload.bytes,
            restored_bytes=run.workload.restored_bytes,
            variants=run.variants,
            scale=(run.workload.scale or "smaller than full size") if run.workload.scaled else None,
            volatile={
                target: volatile_of(run.environment.storage_of(target))
                for target in (None, *run.environment.storages)
            },
            repeats_every=repeats_every(run),
        )

    def volatile_under(self, sample: Sample) -> str | None:
        """Return the file system in memory that the sample was measured on; None for others."""
        return self.volatile.get(sample.axes.target)

    def expected_bytes(self, sample: Sample) -> int:
        """Return the bytes that the sample must have moved."""
        for one in self.variants:
            if (one.operation, one.axes) == (sample.operation, sample.axes):
                return one.bytes
        if sample.operation == "restore" and self.restored_bytes is not None:
            return self.restored_bytes
        return self.workload_bytes


def volatile_of(storage: Storage) -> str | None:
    """Return the file system of a storage if it is held in memory; None otherwise."""
    found = [storage.fs_type, storage.upper and storage.upper.fs_type]
    return next((kind for kind in _VOLATILE if kind in found), None)


def repeats_every(run: Run) -> int | None:
    """Return after how many bytes the data of one process repeat; None where no byte does.

    The processes of a machine share the memory for data. Where it is smaller than a checkpoint,
    storage may recognise bytes that it has seen: what it then reaches is not what it reaches with
    the bytes of a trainer.
    """
    pool, numjobs = run.plan.get("pool_bytes"), run.plan.get("numjobs")
    if not isinstance(pool, int):
        return None
    jobs = max(map(int, numjobs), default=1) if isinstance(numjobs, Sequence) else 1
    if run.world is not None:
        jobs = run.world.local
    period = pool // jobs
    return period if period < run.workload.bytes else None


def judge(sample: Sample, context: Context) -> Verdict:
    """Return the verdict on one sample; pass a save through `with_verification` first."""
    invalid, unproved = list(_invalid(sample, context)), list(_unproved(sample, context))
    status = VerdictStatus.VALID if context.scale is None else VerdictStatus.SCALED
    if unproved:
        status = VerdictStatus.UNPROVED
    return Verdict(
        status=VerdictStatus.INVALID if invalid else status,
        reasons=(*invalid, *unproved, *_noted(sample, context)),
    )


def judged(result: ResultFile) -> list[tuple[Sample, Verdict]]:
    """Return every sample of a run, saves with their proof, and its verdict."""
    context = Context.of(result.run)
    return [(one, judge(one, context)) for one in with_verification(result.samples, context)]


def has_wrong_bytes(samples: Iterable[Sample]) -> bool:
    """Return whether a restore found other bytes than were saved. Such a setting has FAILED."""
    return any(sample.verified and sample.verified.mismatches for sample in samples)


def combine(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the worst of `verdicts` with every reason once.

    A reason has its share unless all of them have it. Raises ValueError without a verdict.
    """
    if not verdicts:
        raise ValueError("no verdicts to combine")
    merged: dict[str, list[Reason]] = {}
    for verdict in verdicts:
        for reason in {reason.text: reason for reason in verdict.reasons}.values():
            merged.setdefault(reason.text, []).append(reason)
    worst = max((verdict.status for verdict in verdicts), key=list(VerdictStatus).index)
    return Verdict(
        status=worst,
        reasons=tuple(_merge(same, len(verdicts)) for same in merged.values()),
    )


def with_verification(samples: Iterable[Sample], context: Context) -> list[Sample]:
    """Return `samples`, each save with the proof of the restore that read its bytes back.

    This is the restore of the same contender in the same repetition, otherwise in another one. So
    every configuration is verified, but perhaps not every save. Of several restores it is the one
    with the most wrong tensors, then the one with the most tensors. Where it read only some of
    them, a note says how much. Right tensors prove nothing where the restore itself is not valid:
    it may have read memory. A save without a proof is returned unchanged.
    """
    given = list(samples)
    proofs: dict[tuple[str, int | None], Sample] = {}
    for sample in given:
        if sample.operation == "restore" and _is_proof(sample, context):
            for repetition in (sample.repetition, None):
                key = contender_of(sample), repetition
                proofs[key] = max(proofs.get(key, sample), sample, key=_proves)
    return [
        sample
        if sample.operation == "restore" or sample.verified is not None
        else _proved(
            sample,
            proofs.get(
                (contender_of(sample), sample.repetition), proofs.get((contender_of(sample), None))
            ),
        )
        for sample in given
    ]


def _is_proof(restore: Sample, context: Context) -> bool:
    if restore.verified is None:
        return False
    if restore.verified.mismatches:
        return True
    # Where the files themselves are in memory, no restore can be cold.
    warm = context.volatile_under(restore) is None and any(_not_cold(restore))
    return not warm and not any(violations(restore))


def _proves(restore: Sample) -> tuple[int, int]:
    """Return a sort key for proofs: one wrong tensor counts more than any number of right ones."""
    one = restore.verified
    return (one.mismatches, one.tensors) if one else (0, 0)


def _proved(save: Sample, restore: Sample | None) -> Sample:
    if restore is None or restore.verified is None:
        return save
    verified, notes = restore.verified, save.notes
    if restore.axes.restore_as is not None:
        notes += (
            f"only the tensors of a restore of {restore.axes.restore_as} were compared: "
            f"{verified.tensors} of them, {_percent(verified.bytes / save.bytes)} of the bytes",
        )
    return replace(save, verified=verified, notes=notes)


def _invalid(sample: Sample, context: Context) -> Iterator[Reason]:
    if not sample.stores:
        yield Reason(text="stores nothing: this is the harness's own speed, not a storage figure")
        return
    expected = context.expected_bytes(sample)
    if sample.bytes != expected:
        yield Reason(
            text="moved another number of bytes than the workload has",
            measured=(f"{sample.bytes} of {expected} bytes",),
        )
    yield from violations(sample)
    if sample.operation == "restore":
        yield from _not_cold(sample)
    if sample.axes.background is not None:
        yield from _background_missing(sample)
    if sample.verified is None:
        yield Reason(text="not verified: no valid restore compared these bytes with the saved ones")
    elif sample.verified.mismatches:
        yield Reason(
            text=WRONG_BYTES,
            measured=(f"{sample.verified.mismatches} of {sample.verified.tensors}",),
        )


def _background_missing(sample: Sample) -> Iterator[Reason]:
    """Yield why the restores in the background were not there all the time, or not cold."""
    one = sample.background_restores
    if one is None or one.error:
        measured = (one.error,) if one else ()
        yield Reason(text="nothing was restored in the background", measured=measured)
        return
    for seconds, when in ((one.lead_s, "began"), (one.lag_s, "ended")):
        if seconds < 0:
            missing = f"{format_seconds(-seconds)} of {format_seconds(sample.elapsed_s)} without it"
            text = f"the restores in the background {when} within the {sample.operation}"
            yield Reason(text=text, measured=(missing,))
    if one.mismatches:
        yield Reason(
            text="the restores in the background brought back wrong bytes",
            measured=(f"{one.mismatches} tensors",),
        )
    part = _background_from_storage(sample)
    if one.resident_fraction > RESIDENT_LIMIT:
        stayed = f"{_percent(one.resident_fraction)} in the page cache"
        yield Reason(text="the restores in the background were not cold", measured=(stayed,))
    elif part is not None and part < NEAR_ZERO:
        share = f"{_percent(part)} of their bytes by the process's counter"
        text = "the restores in the background did not come from storage"
        yield Reason(text=text, measured=(share,))


def _background_from_storage(sample: Sample) -> float | None:
    """Return the counted part; None where the storage has no counter that could confirm it."""
    counted = sample.device is not None and sample.device.read_bytes is not None
    return (
        sample.background_restores.from_storage if counted and sample.background_restores else None
    )


def violations(sample: Sample) -> Iterator[Reason]:
    """Yield what the writer failed to do or reported wrongly, whatever the workload and the cache.

    Each violation makes the sample INVALID, and a tuning eliminates the setting. Samples of writers
    that store nothing have no violations.
    """
    if not sample.stores:
        return
    if sample.stored is not None and sample.stored.ignored_syncs:
        yield Reason(
            text="syncs are ignored here, so nothing is durable",
            measured=(sample.stored.ignored_syncs,),
        )
    if sample.operation == "save":
        yield from _not_durable(sample)
    if sample.stored is not None and sample.stored.problems:
        yield Reason(text="files are not as saved", measured=sample.stored.problems)
    short, _ = _unreached(sample)
    if short:
        yield short
    if not sample.setting.writer.startswith(PREFIX):  # the bench itself counts for a peer
        yield from _phases_wrong(sample)
        yield from _paths_wrong(sample)


def _not_durable(save: Sample) -> Iterator[Reason]:
    if not save.durable:
        yield Reason(text="not durable: the writer itself reports that it did not sync")
    if save.stored is not None and save.stored.unsynced_bytes:
        yield Reason(
            text="not durable: dirty pages were left after the save",
            measured=(f"{save.stored.unsynced_bytes} bytes",),
        )
    if save.stored is not None and save.stored.flushed is False:
        yield Reason(text="not durable: the writer returned before the device flushed its cache")


def _phases_wrong(sample: Sample) -> Iterator[Reason]:
    """Yield wrong phases. Phases of parallel workers are averaged; only `write` may overlap."""
    phases = sample.phases_s
    written_s = phases.get("write", 0.0)
    rest_s = sum(phases.values()) - written_s
    most_s = sample.elapsed_s * (1 + _CLOCK_SLACK) + _CLOCK_SLACK_S
    finite = all(math.isfinite(seconds) and seconds >= 0 for seconds in phases.values())
    if not finite or max(written_s, rest_s) > most_s:
        shown = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in phases.items())
        yield Reason(
            text="phases that its time cannot hold",
            measured=(f"{shown} in {sample.elapsed_s:.3g} s",),
        )


def _paths_wrong(sample: Sample) -> Iterator[Reason]:
    """Yield wrong paths. Bytes include the padding of direct I/O and repeated operations."""
    if not sample.paths:
        return
    counted = sum(path.bytes for path in sample.paths.values())
    operations = sum(path.operations for path in sample.paths.values())
    most = _COUNTED_MOST * sample.bytes + _PADDING * operations
    if (sample.axes.restore_as or "").startswith("tp="):
        most = math.inf  # what is between the rows of columns is read too, as a note says
    least = _COUNTED_LEAST * sample.bytes
    if min(path.bytes for path in sample.paths.values()) < 0 or not least <= counted <= most:
        yield Reason(
            text="its paths do not add up to the bytes moved",
            measured=(f"{counted} of {sample.bytes} bytes",),
        )
    yield from _cached_all_the_same(sample)


def _cached_all_the_same(sample: Sample) -> Iterator[Reason]:
    """Yield a reason if more of the files is in the page cache than other paths can have left."""
    direct = sum(sample.paths[name].bytes for name in _PAST_THE_CACHE & sample.paths.keys())
    cached = sample.memory.page_cache_bytes if sample.memory is not None else None
    # A restore may read the head of a file, and what the kernel reads ahead, through the cache.
    if cached is None or not direct or sample.operation != "save":
        return
    others = sum(
        path.bytes + _PADDING * path.operations
        for name, path in sample.paths.items()
        if name not in _PAST_THE_CACHE
    )
    if cached - others > max(_PADDING, NEAR_ZERO * direct):
        yield Reason(
            text="went through the page cache, and not past it as the writer reports",
            measured=(f"{cached} bytes are cached",),
        )


def _not_cold(sample: Sample) -> Iterator[Reason]:
    if sample.cold is None:
        yield Reason(text="not proved cold: the page cache was not looked at before the clock")
    elif sample.cold.resident_fraction > RESIDENT_LIMIT:
        yield Reason(
            text=f"not cold: more than {_percent(RESIDENT_LIMIT)} was still in the page cache",
            measured=(_percent(sample.cold.resident_fraction),),
        )


def _unreached(sample: Sample) -> tuple[Reason | None, list[Reason]]:
    """Return why the bytes did not reach the device by its counters, or None; and the notes.

    Where both counters saw a part of the bytes, both must deny them. The device's counter may be
    that of another layer (RAID). The process's counter counts a buffered write before it leaves the
    cache. One counter that saw almost nothing is enough: for a save the device's. For a cold
    restore also the process's, because the device counts the reads of other processes too.
    """
    save = sample.operation == "save"
    counts = _counts(sample)
    moved = sample.stored_bytes
    parts = {name: count / moved for name, count in counts.items() if count is not None and moved}
    low = {name: part for name, part in parts.items() if part < REACHED_LIMIT}
    what = "did not reach the device" if save else "did not come from the device"
    if "device" in low and ("process" in low or (not save and "process" not in parts)):
        seen, whose = max(low.values()), ""
    elif parts.get("device", 1.0) < NEAR_ZERO and (save or not any(_not_cold(sample))):
        seen, whose = parts["device"], " by its counter"
    elif not save and "device" in parts and parts.get("process", 1.0) < NEAR_ZERO:
        if any(_not_cold(sample)):
            return None, []
        seen, whose = parts["process"], " by this process"
    elif save and "device" in low and sample.stored is not None and sample.stored.unseen:
        seen, whose = low["device"], f" by its counter; {sample.stored.unseen}"
    else:
        noted = [
            Reason(
                text=f"the {name}'s own counter saw less than was moved",
                measured=(_percent(part),),
            )
            for name, part in low.items()
        ]
        noted += [
            Reason(text=f"not checked against the {name}'s own counter: there is none")
            for name, count in counts.items()
            if count is None and (save or name == "device")
        ]
        return None, noted
    share = f"{_percent(seen)} of them{whose}"
    return Reason(text=f"the bytes {what}", measured=(share,)), []


def _counts(sample: Sample) -> dict[str, int | None]:
    device = sample.device or DeviceCounts(
        read_bytes=None, write_bytes=None, process_read_bytes=None, process_write_bytes=None
    )
    if sample.operation == "save":
        return {"device": device.write_bytes, "process": device.process_write_bytes}
    return {"device": device.read_bytes, "process": device.process_read_bytes}


def _noted(sample: Sample, context: Context) -> Iterator[Reason]:
    if context.scale is not None:
        yield Reason(text=f"scaled: {context.scale}")
    if sample.axes.restore_as is not None:
        all_of_it = sample.setting.at(restore_as=None)
        whole = context.expected_bytes(replace(sample, operation="save", setting=all_of_it))
        part = _percent(sample.bytes / whole)
        share = f"{part} of the bytes, {sample.axes.restore_as} was asked"
        yield Reason(text="only some tensors were restored", measured=(share,))
    together = sample.axes.restore_mode is not None and sample.operation == "restore"
    counted = sample.device.read_bytes if together and sample.device is not None else None
    if counted is not None and sample.bytes:
        text = "read from the device, of the bytes that all ranks restored"
        yield Reason(text=text, measured=(_percent(counted / sample.bytes),))
    if sample.stores:
        if context.repeats_every is not None:
            yield Reason(text=f"{REPEATS}{format_size(context.repeats_every)}")
        if volatile := context.volatile_under(sample):
            yield Reason(text=f"not durable: {volatile}")
        yield from _unreached(sample)[1]
    for fallback in sample.fallbacks:
        yield Reason(text=f"wanted {fallback.wanted}, used {fallback.used}: {fallback.reason}")
    delivered = _background_from_storage(sample)
    if delivered is not None and NEAR_ZERO <= delivered < REACHED_LIMIT:
        text = "of the restores in the background, storage delivered only a part"
        yield Reason(text=text, measured=(_percent(delivered),))
    for note in sample.notes:
        yield Reason(text=note)


def _unproved(sample: Sample, context: Context) -> Iterator[Reason]:
    """Yield why nothing proves the figure, and nothing could disprove it.

    Of a save no counter shows a missing sync. Of a restore the device delivered all bytes, but this
    process read only a part of them: the rest may be from memory, while another program read.
    Where only the device counts, a small restore proves nothing: others read as much by chance.
    Between two restores in the background their files leave the page cache. Where that takes long,
    nothing proves that the operation had to share the storage.
    """
    if sample.background_restores is not None and not sample.background_restores.error:
        part = sample.background_restores.reading_s / sample.elapsed_s
        if part < _MOSTLY:
            text = "the background restored only a part of the time"
            yield Reason(text=text, measured=(_percent(part),))
    if not sample.stores or context.volatile_under(sample) is not None:
        return
    counts = _counts(sample)
    if sample.operation == "save":
        unseen = sample.stored.unseen if sample.stored is not None else ""
        if unseen and counts["device"] is None:
            yield Reason(text=f"not proved durable: {unseen}, and the device has no counter")
        return
    process, moved = counts["process"], sample.stored_bytes
    if process is None and counts["device"] is not None and 0 < moved < _LEAST_PROOF:
        yield Reason(
            text="too small to prove cold: this process has no counter, and others may have read "
            "as much from the device",
            measured=(format_size(moved),),
        )
    if process is None or not moved or not NEAR_ZERO <= process / moved < REACHED_LIMIT:
        return
    yield Reason(
        text="not proved cold: this process read a part of the bytes, the rest may be from memory",
        measured=(_percent(process / moved),),
    )


def _merge(same: Sequence[Reason], of: int) -> Reason:
    share = "" if len(same) == of else f"{len(same)} of {of} samples"
    measured = dict.fromkeys(figure for reason in same for figure in reason.measured)
    return replace(same[0], measured=tuple(measured), share=share)


def _percent(part: float) -> str:
    return f"{100 * part:.3g}%"
