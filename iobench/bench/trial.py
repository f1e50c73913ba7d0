"""Trial: one timed save and one timed, cold, verified restore of a replay by one writer."""

from __future__ import annotations

from dataclasses import dataclass

from iobench.bench.counters import Counted, Counters, Monitor
from iobench.bench.replay import Replay
from iobench.bench.target import Location, Scratch
from iobench.results import Cold, Operation, Sample, Verified, utc_now
from iobench.writers.base import Writer
from iobench.writers.transfer import Transfer

__all__ = ["Trial"]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One writer in one place of one repetition.

    The clock of `save` covers everything up to the published, durable checkpoint: files, their
    syncs, the manifest, directory syncs and the rename. That of `restore` covers opening, parsing
    and reading. Making the bytes, evicting, verifying and removing are outside.
    """

    run_id: str
    repetition: int
    order: int
    writer: Writer
    replay: Replay
    scratch: Scratch
    monitor: Monitor
    notes: tuple[str, ...] = ()
    """What a reader of a restore must know of the target."""

    def save(self) -> Sample:
        """Save a checkpoint of fresh bytes; it stays for `restore`."""
        self.replay.prepare()
        started, counters = utc_now(), Counters(self.monitor)
        if not self.writer.stores:
            transfers = self.replay.save(self.writer, self._checkpoint)
            return self._sample("save", transfers, counters.stop(), started)
        with self.scratch.staged(self._name) as staged:
            transfers = self.replay.save(self.writer, staged.directory)
            written_s = counters.elapsed_s()
            staged.publish(self._manifest(transfers))
            commit_s = counters.elapsed_s() - written_s
        return self._sample("save", transfers, counters.stop(), started, commit_s=commit_s)

    def restore(self) -> Sample | None:
        """Restore the saved checkpoint from a cold cache and verify it.

        None for a writer that stores nothing: there is nothing to restore.
        """
        if not self.writer.stores:
            return None
        self.replay.scrub()
        cold = self.scratch.make_cold(self._name)
        started, counters = utc_now(), Counters(self.monitor)
        transfers = self.replay.restore(self.writer, self._checkpoint)
        counted = counters.stop()
        verified = self.replay.verify(self.writer, self._checkpoint)
        return self._sample("restore", transfers, counted, started, cold=cold, verified=verified)

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
            "writer": {"name": self.writer.name, "options": self.writer.options.to_dict()},
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
            writer=self.writer.name,
            options=self.writer.options.to_dict(),
            operation=operation,
            bytes=total.bytes,
            elapsed_s=counted.elapsed_s,
            first_done_s=counted.elapsed_s,
            last_done_s=counted.elapsed_s,
            phases_s=phases,
            paths=total.paths,
            retries=total.retries,
            fallbacks=total.fallbacks,
            cpu_s=counted.cpu_s,
            system_cpu_s=counted.system_cpu_s,
            cold=cold,
            device=counted.device if self.scratch.directory is not None else None,
            verified=verified,
            stores=self.writer.stores,
            notes=self.replay.notes + (self.notes if operation == "restore" else ()),
            started_at=started,
        )
