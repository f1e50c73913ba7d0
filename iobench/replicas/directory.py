"""ReplicaDirectory: the replicas of a job in the memory of this node, as files on tmpfs.

    /dev/shm/iobench-UID/replicas/JOB/      mode 0700
        job.json                            location, and how long the files stay
        SERIAL-STEP-ATTEMPT/                a version
            __0_0.distcp                    the bytes of rank 0, as in a checkpoint
            rank-0-of-2                     their SaveHeader; written last

The files outlive the trainer, also one that is killed. A reboot removes them.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import mmap
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec
import xxhash

from iobench import linux
from iobench.checkpoint.checksums import compared
from iobench.checkpoint.ranked.messages import Part
from iobench.checkpoint.ranked.plan import data_file
from iobench.environment.memory import available_bytes
from iobench.errors import ReplicaError, TargetError, transfer_errors
from iobench.ranks.rendezvous import runtime_directory, runtime_path
from iobench.text import parse_json
from iobench.units import GIB, format_size
from iobench.writers.image import FileImage
from iobench.writers.local.directory_lock import LOCK, DirectoryLock

_RUN_IDS = ("IOBENCH_JOB", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "PMIX_NAMESPACE", "PMI_JOBID")
_SPARE = GIB
"""Memory that is left to everything else on the node."""
_UNREADABLE_S = 60.0  # another process may be about to write the facts
_JOB, _HOLDER = "job.json", "Checkpointer"


def job_of(location: str) -> str:
    """Return the name of the job, the same after a restart by its launcher.

    It is the launcher's run id (torchrun's `--rdzv-id`, Slurm's job id; IOBENCH_JOB overrides it)
    and the location of the checkpoints.
    """
    run = next((os.environ[name] for name in _RUN_IDS if os.environ.get(name)), "")
    return f"{run} {location}"


class Version(NamedTuple):
    """One save of all ranks. Of two saves of a run, the later one has the greater `serial`.

    `attempt` is the token of the start of the job that made it. A step that was saved twice, before
    and after a restart, has two versions; their bytes are never mixed.
    """

    serial: int
    step: int
    attempt: str


class SaveHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The part manifest of a rank. That of rank 0 has the table of the tensors of all ranks too."""

    part: Part
    created_s: float
    table: str | None = None

    def to_bytes(self) -> bytes:
        """Return the header as JSON, with a checksum of it in front."""
        text = msgspec.json.encode(self)
        return xxhash.xxh3_64_digest(text) + text

    @classmethod
    def parse(cls, data: bytes, where: str) -> SaveHeader:
        """Return the header in `data`. Raises ReplicaError for damage."""
        checksum, text = data[:8], data[8:]
        if xxhash.xxh3_64_digest(text) != checksum:
            raise ReplicaError(f"{where}: the header is damaged")
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise ReplicaError(f"{where}: the header is of another version ({error})") from error

    def check(self, image: FileImage) -> None:
        """Raise DataMismatchError unless the bytes are those of the part."""
        with compared(image, self.part.file, f"the replica of rank {self.part.rank}"):
            pass  # they are there already


class ReplicaDirectory:
    """The files of one job on this node. One process of the node has its lock, see `take`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: DirectoryLock | None = None

    @classmethod
    def of(cls, job: str) -> Self:
        """Return that of a job; it may not exist."""
        name = hashlib.sha256(job.encode()).hexdigest()[:16]
        return cls(runtime_directory() / "replicas" / name)

    def take(self, *, location: str, keep_s: float) -> None:
        """Make the directory and lock it. Raises TargetError while another process has it."""
        self.path.parent.mkdir(mode=0o700, exist_ok=True)
        self.path.mkdir(mode=0o700, exist_ok=True)
        self._lock = DirectoryLock(self.path, _HOLDER)
        facts = {"location": location, "keep_s": keep_s}
        (self.path / _JOB).write_text(json.dumps(facts), "utf-8")

    def release(self) -> None:
        """Release the lock. The files stay."""
        if self._lock is not None:
            os.utime(self.path)  # `keep_s` counts from here
            self._lock.release()
            self._lock = None

    def facts(self) -> dict[str, Any]:
        """Return `location` and `keep_s`; empty if they cannot be read."""
        try:
            found = parse_json((self.path / _JOB).read_bytes())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def listed(self) -> list[tuple[Version, int, int]]:
        """Return the version, the rank and the number of ranks of all complete bytes."""
        found = []
        for version, path in self._versions():
            for file in path.glob("rank-*-of-*"):
                _, rank, _, ranks = file.name.split("-")
                found.append((version, int(rank), int(ranks)))
        return found

    def _versions(self) -> Iterator[tuple[Version, Path]]:
        if not self.path.is_dir():
            return
        for path in sorted(self.path.iterdir()):
            serial, step, attempt = [*path.name.split("-", 2), "", ""][:3]
            if serial.isdigit() and step.isdigit():
                yield Version(int(serial), int(step), attempt), path

    def _at(self, version: Version) -> Path:
        return self.path / f"{version.serial}-{version.step}-{version.attempt}"

    def new_file(
        self, version: Version, rank: int, size_bytes: int, budget_bytes: int | None
    ) -> FileImage:
        """Return new memory for the bytes of `rank`, with pages.

        Raises ReplicaError when the budget of the node, its memory, /dev/shm or a limit of a
        control group does not allow it; then nothing was taken.
        """
        with self._alone(), transfer_errors("making", self._at(version)):
            self._check_room(size_bytes, budget_bytes)
            self._at(version).mkdir(mode=0o700, exist_ok=True)
            path = self._at(version) / data_file(rank)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                if size_bytes:
                    # Now, and not at the first access, which cannot fail but by the OOM killer.
                    linux.fallocate(fd, 0, size_bytes)
            except OSError as error:
                path.unlink()
                asked = f"{format_size(size_bytes)} more for a replica"
                raise ReplicaError(f"{asked}: {error.strerror}") from error
            finally:
                os.close(fd)
        return self.image(version, rank, writable=True)

    def _check_room(self, needed: int, budget: int | None) -> None:
        asked = f"{format_size(needed)} more for a replica do not fit"
        taken, found = self.taken_bytes(), os.statvfs(self.path)
        if budget is not None and taken + needed > budget:
            raise ReplicaError(
                f"{asked} the budget: {format_size(taken)} of {format_size(budget)} are taken"
            )
        free = found.f_bavail * found.f_frsize
        if found.f_blocks and needed > free:  # 0: no limit
            raise ReplicaError(f"{asked} {self.path}: {format_size(free)} are free")
        available = available_bytes()
        if available is not None and needed + _SPARE > available:
            raise ReplicaError(
                f"{asked} the memory of the node: {format_size(available)} are available, "
                f"{format_size(_SPARE)} of it are left to other processes"
            )

    def taken_bytes(self) -> int:
        """Return the memory of all files."""
        found = 0
        for path in self.path.rglob("*"):
            with suppress(FileNotFoundError):
                found += path.lstat().st_blocks * 512
        return found

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Let no other rank of this node count memory meanwhile."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def image(self, version: Version, rank: int, *, writable: bool = False) -> FileImage:
        """Return the bytes of `rank`, which are mapped. Raises TransferError."""
        path = self._at(version) / data_file(rank)
        with transfer_errors("mapping", path):
            fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
            try:
                size = os.fstat(fd).st_size
                access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
                memory = [mmap.mmap(fd, size, access=access)] if size else []
            finally:
                os.close(fd)
        return FileImage.of(data_file(rank), memory)

    def copy(self, version: Version, rank: int, image: FileImage) -> None:
        """Write the bytes of `image` into the file of `new_file`. Raises TransferError."""
        path = self._at(version) / data_file(rank)
        # Not through the mapping: page by page, with a fault for each.
        with transfer_errors("writing", path), open(path, "r+b", buffering=0) as file:
            for view in image.views(0, image.size_bytes):
                left = memoryview(view.data)
                while len(left):
                    left = left[file.write(left) :]

    def complete(self, version: Version, rank: int, ranks: int, header: bytes) -> None:
        """Make the bytes of `rank` complete. Raises TransferError."""
        path = self._at(version) / f"rank-{rank}-of-{ranks}"
        aside = path.with_name(f".{path.name}")
        with transfer_errors("writing", path):
            aside.write_bytes(header)
            aside.rename(path)

    def header(self, version: Version, rank: int, ranks: int) -> SaveHeader:
        """Return the header of complete bytes. Raises ReplicaError."""
        path = self._at(version) / f"rank-{rank}-of-{ranks}"
        with transfer_errors("reading", path):
            return SaveHeader.parse(path.read_bytes(), str(path))

    def keep(self, kept: Version | None) -> None:
        """Remove all other versions. Raises TransferError."""
        for version, path in list(self._versions()):
            if version != kept:
                _remove(path)

    def remove(self) -> None:
        """Remove everything, and release the lock. Raises TransferError."""
        _remove(self.path)
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def remove_unless_used(self) -> bool:
        """Remove everything unless a process has the lock; whether it was removed."""
        try:
            self._lock = DirectoryLock(self.path, _HOLDER)
        except TargetError:
            return False
        self.remove()
        return True


def _remove(path: Path) -> None:
    with transfer_errors("removing", path), suppress(FileNotFoundError):
        shutil.rmtree(path)


def replica_directories() -> list[ReplicaDirectory]:
    """Return those of all jobs of this user on this node."""
    if not (runtime_path() / "replicas").exists():
        return []
    found = sorted((runtime_directory() / "replicas").iterdir())
    return [ReplicaDirectory(path) for path in found if path.is_dir()]


def remove_unused(own: ReplicaDirectory, location: str) -> None:
    """Remove the files of other jobs of this location, and of those that did not come back in time.

    A directory that a process uses stays.
    """
    for one in replica_directories():
        facts = one.facts()
        with suppress(FileNotFoundError):
            idle_s = time.time() - max(one.path.stat().st_mtime, (one.path / LOCK).stat().st_mtime)
            late = idle_s > facts.get("keep_s", _UNREADABLE_S)
            if one.path != own.path and (late or facts.get("location") == location):
                one.remove_unless_used()
