"""BucketTarget: checkpoints under a prefix of a bucket."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from iobench.bench.contenders.base import Contender, WriterContender
from iobench.bench.processes.interrupts import deferred_interrupts
from iobench.bench.targets.base import Scratch
from iobench.bench.targets.directory import PREFIX
from iobench.environment import DeviceMonitor, Machine, Storage, describe_machine
from iobench.environment.storage import OBJECT_STORE
from iobench.errors import IobenchError, TargetError, TransferError, UsageError
from iobench.results.codec import from_plain
from iobench.writers.base import Writer
from iobench.writers.image import FileImage
from iobench.writers.s3 import S3Writer
from iobench.writers.s3_store.target import S3Target

_LOCK = "lock"
_NOTE = "the client holds none of a remote object; what the server's caches hold is unknown"


@dataclass(frozen=True, kw_only=True)
class BucketTarget:
    """A writable prefix. `writer` does the work that is not measured: locks and cleaning up."""

    place: S3Target
    writer: Writer
    no_ceiling = "fio does not measure S3"
    notes: tuple[str, ...] = (_NOTE,)

    @classmethod
    def of(cls, location: str, contenders: Sequence[Contender]) -> BucketTarget:
        """Return the target, with the S3 client of the first of our writers in `contenders`."""
        place = S3Target.parse(location)
        chosen = [
            one.writer
            for one in contenders
            if isinstance(one, WriterContender) and one.stores and "s3" in one.writer.schemes
        ]
        if not chosen and not any(one.is_peer for one in contenders):
            raise UsageError(f"{location}: needs --writer s3")
        return cls(place=place, writer=chosen[0] if chosen else S3Writer())

    @property
    def location(self) -> str:
        return str(self.place)

    def check(self) -> None:
        self.writer.require(self.location)

    def free_bytes(self) -> int | None:
        return None

    def describe(self) -> tuple[Machine, Storage]:
        endpoint = self.writer.objects(self.location).endpoint
        return describe_machine(), Storage(
            path=self.location, kind=OBJECT_STORE, fs_type="s3", endpoint=endpoint
        )

    def monitor(self) -> DeviceMonitor:
        return DeviceMonitor("/proc")  # it has no device of this machine either

    @contextmanager
    def scratch(self) -> Iterator[Scratch]:
        """Yield the run's own prefix; at the end its objects are deleted and its uploads aborted.

        Ctrl-C cannot interrupt that. What killed runs left is removed first, like in a directory:
        an object `lock` names the process of each run. A bucket shows no process of another machine
        or container, so their runs count as alive.
        """
        self._remove_stale()
        place = self.place.below(f"{PREFIX}{secrets.token_hex(6)}")
        try:
            with deferred_interrupts():
                lock = FileImage.of(_LOCK, [Holder.ourselves().to_bytes()])
                self.writer.write(lock, str(place))
            yield Scratch(location=str(place), writer=self.writer)
        finally:
            with deferred_interrupts():
                self.writer.objects(str(place)).remove(last=_LOCK)

    def _remove_stale(self) -> None:
        for name in self.writer.objects(self.location).names(PREFIX):
            place = self.place.below(name)
            holder = self._holder(place)
            if holder is None or not holder.dead:
                continue
            try:
                with deferred_interrupts():
                    self.writer.objects(str(place)).remove(last=_LOCK)
            except IobenchError as error:
                raise TargetError(
                    f"{place}: left by a killed run, cannot be removed ({error})"
                ) from error

    def _holder(self, place: S3Target) -> Holder | None:
        """Return the process of a run; None where the lock is missing or is not a Holder."""
        try:
            with contextlib.closing(self.writer.open_source(str(place.below(_LOCK)))) as lock:
                return Holder.parse(bytes(lock.read()))
        except TransferError as error:
            if error.errno != errno.ENOENT:
                raise
            return None


@dataclass(frozen=True, kw_only=True)
class Holder:
    """One process, distinguished from a later one with the same process id.

    It replaces the lock that a run holds in a directory, since a bucket has no locks.
    """

    boot: str
    """The running kernel (/proc/sys/kernel/random/boot_id)."""
    pids: str
    """The PID namespace of `pid` (/proc/self/ns/pid); each container has its own."""
    pid: int
    started: int
    """Clock ticks from boot to the start of the process (field 22 of /proc/PID/stat)."""

    @classmethod
    def ourselves(cls) -> Self:
        """Return the holder for this process."""
        pid = os.getpid()
        started = _started(pid)
        assert started is not None
        boot, pids = _here()
        return cls(boot=boot, pids=pids, pid=pid, started=started)

    @classmethod
    def parse(cls, text: bytes) -> Self | None:
        """Return the holder that `to_bytes` wrote; None for any other text."""
        try:
            return from_plain(cls, json.loads(text))
        except ValueError:
            return None

    def to_bytes(self) -> bytes:
        """Return the bytes that `parse` accepts."""
        return json.dumps(asdict(self)).encode()

    @property
    def dead(self) -> bool:
        """Whether it has ended for certain; False for other machines and containers."""
        return (self.boot, self.pids) == _here() and _started(self.pid) != self.started


def _here() -> tuple[str, str]:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot, os.readlink("/proc/self/ns/pid")


def _started(pid: int) -> int | None:
    """Return the start of process `pid`; None if it does not exist or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])
