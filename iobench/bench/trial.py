"""Trial: one timed save and one timed, cold, verified restore of a replay by one contender."""

from __future__ import annotations

from dataclasses import dataclass

from iobench import linux
from iobench.bench.contender import Contender
from iobench.bench.counters import Counted, Counters, Monitor
from iobench.bench.replay import Replay
from iobench.bench.sampler import Sampler
from iobench.bench.series import make_series
from iobench.bench.target import Location, Scratch
from iobench.results import Cold, Failure, Operation, Sample, Verified, utc_now
from iobench.writers.transfer import Transfer

__all__ = ["Trial"]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One contender in one place of one repetition.

    The clock of `save` covers everything up to the published, durable checkpoint: files, their
    syncs, the manifest, directory syncs and the rename. That of `restore` covers opening, parsing
    and reading. Making the bytes, evicting, verifying and removing are outside.
    """

    run_id: str
    repetition: int
    order: int
    contender: Contender
    replay: Replay
    scratch: Scratch
    monitor: Monitor
    sampler: Sampler | None = None
    notes: tuple[str, ...] = ()
    """What a reader of a restore must know of the target."""

    def save(self) -> Sample | None:
        """Save a checkpoint of fresh bytes; it stays for `restore`.

        None for a contender that only restores: the save was another's.
        """
        self.replay.prepare()
        started, counters = utc_now(), Counters(self.monitor, self.sampler)
        if not self.contender.stores:
            transfers = self.contender.save(self.replay, self._checkpoint)
            return self._sample("save", transfers, counters.stop(), started)
        with self.scratch.staged(self._name) as staged:
            transfers = self.contender.save(self.replay, staged.directory)
            written_s = counters.elapsed_s()
            staged.publish(self._manifest(transfers))
            commit_s = counters.elapsed_s() - written_s
        counted = counters.stop()
        if not self.contender.saves:
            return None
        return self._sample("save", transfers, counted, started, commit_s=commit_s)

    def restore(self) -> Sample | None:
        """Restore the saved checkpoint from a cold cache and verify it.

        None for a contender that stores nothing: there is nothing to restore.
        """
        if not self.contender.stores:
            return None
        self.replay.scrub()
        cold = self.scratch.make_cold(self._name)
        started, counters = utc_now(), Counters(self.monitor, self.sampler)
        transfers = self.contender.restore(self.replay, self._checkpoint)
        counted = counters.stop()
        verified = self.contender.verify(self.replay, self._checkpoint)
        linux.trim_heap()  # memory that this one freed is no help to the next one
        return self._sample("restore", transfers, counted, started, cold=cold, verified=verified)

    def failure(self, operation: Operation, error: Exception) -> Failure:
        """The record that says that `operation` raised `error`."""
        return Failure(
            run_id=self.run_id,
            repetition=self.repetition,
            order=self.order,
            writer=self.contender.name,
            options=self.contender.options,
            operation=operation,
            error=" ".join(f"{type(error).__name__}: {error}".split()),
            started_at=utc_now(),
        )

    def clear(self) -> None:
        """Remove the checkpoint, if there is one."""
        self.scratch.remove(self._name)

    @property
    def _name(self) -> str:
        return f"step-{self.repetition}-{self.order}"

    @property
    def _checkpoint(self) -> Location:
        return self.scratch.locate(self._name)

    def _manifest(self, transfers: list[Transfer]) -> dict[str, object]:
        return {
            "schema": "iobench.manifest/1",
            "step": self.repetition,
            "writer": {"name": self.contender.name, "options": dict(self.contender.options)},
            "files": [
                {"path": spec.path, "format": spec.format, "bytes": transfer.bytes}
                for spec, transfer in zip(self.replay.files, transfers, strict=True)
            ],
        }

    def _sample(
        self,
        operation: Operation,
        transfers: list[Transfer],
        counted: Counted,
        started: str,
        *,
        commit_s: float = 0.0,
        cold: Cold | None = None,
        verified: Verified | None = None,
    ) -> Sample:
        total = Transfer.total(transfers)
        phases = dict(total.phases_s)
        if commit_s:
            phases["commit"] = phases.get("commit", 0.0) + commit_s
        return Sample(
            run_id=self.run_id,
            repetition=self.repetition,
            order=self.order,
            writer=self.contender.name,
            options=self.contender.options,
            operation=operation,
            bytes=total.bytes,
            elapsed_s=counted.elapsed_s,
            first_done_s=counted.elapsed_s,
            last_done_s=counted.elapsed_s,
            phases_s=phases,
            paths=total.paths,
            retries=total.retries,
            fallbacks=total.fallbacks,
            decisions=total.decisions,
            cpu_s=counted.cpu_s,
            system_cpu_s=counted.system_cpu_s,
            cold=cold,
            device=counted.device if self.scratch.directory is not None else None,
            verified=verified,
            stores=self.contender.stores,
            interference=counted.interference,
            series=make_series(
                operation, counted, None if self.contender.is_peer else total.completed
            ),
            notes=self.contender.notes(self.replay)
            + (self.notes if operation == "restore" else ()),
            started_at=started,
        )
