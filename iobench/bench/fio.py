"""fio's rate in the same directory, with the jobs that are most often the fastest.

What fio's clock covers, read in its source (backend.c and filesetup.c of 3.33; the same in 2026):
- The runtime of a job is taken around `do_io`, and `do_io` itself makes the fsync of `end_fsync`
  after the last completion. So the clock includes the final sync, like that of our writers. (With
  `fsync_on_close` it does not, see axboe/fio issue 831, so that option is not used.)
- Creating and preallocating the file happens in `setup_files`, before the clock starts, and fio
  neither syncs the directory nor renames. Our writers do all that inside their clock, so fio's
  rate is slightly too high: by well under 1% for a file of gigabytes.
- Runtimes are whole milliseconds, rounded up.
- fio writes whole blocks only and never writes the rest of `size` after the last one. So the size
  is rounded down to whole blocks here, and a sample has the bytes that fio reports.
- fio writes over an existing file in place, which is cheaper than writing a new one. So a save job
  removes the file first.
- Without `refill_buffers` fio writes the bytes of its first buffers again and again. Storage may
  react to that, like to any bytes that repeat: fresh random bytes were 20% faster here, on a virtio
  disk. Filling takes about 0.2 CPU s per GiB of the job's thread, inside the clock.
- A start takes 0.2 s: fio measures the processor's clock for 0.07 s, also if it does not use it.
  Then it reads the job, `run_threads` sleeps 0.1 s, and the job's thread fills its buffers. Before
  any clock, it runs the shell command of `exec_prerun`. Ours waits for a line, so that a job can
  start while the device frees removed files and settles.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from iobench.bench.processes.interrupts import deferred_interrupts
from iobench.bench.targets.cold import evict_file
from iobench.errors import FioError
from iobench.results.records import Operation
from iobench.units import KIB, MIB, format_size, format_size_exact
from iobench.writers.local.deferred_free import freed_later

FILE_NAME = "iobench-ceiling.fio"
_ALIGNMENT = 4 * KIB  # of sizes and offsets: enough for O_DIRECT on every block device
_RW = {"save": "write", "restore": "read"}
_PRERUN = "Saving output of prerun"  # fio's note about that command
_GRACE_S = 10.0  # how long fio may take to stop after SIGTERM, before it is killed
_GO = "go\n"
_OPTIONS = (
    "--output-format=json",
    "--eta=never",
    "--disk_util=0",
    "--name=ceiling",
    # The default is the processor's own counter, which a virtual machine may have to emulate.
    "--clocksource=clock_gettime",
    # The comment sign hides the file to which fio sends the command's output.
    "--exec_prerun=read go #",
)
_TUNABLES = "GLIBC_TUNABLES"


@dataclass(frozen=True, kw_only=True)
class FioJob:
    """One fio job: engine, bytes per operation, operations in flight."""

    ioengine: str
    block_size: int
    iodepth: int

    @property
    def name(self) -> str:
        """`io_uring 1MiB x 32`."""
        return f"{self.ioengine} {format_size_exact(self.block_size)} x {self.iodepth}"

    def options(
        self, operation: Operation, size_bytes: int, *, fallocate: bool = True
    ) -> dict[str, str | int]:
        """fio's options for `size_bytes`, which must come from `size_for`. Plain integers only.

        `thread` keeps the job in fio's own process: forked jobs call setsid and would outlive it.
        The file's name is relative to fio's directory: fio splits names at colons.
        """
        options: dict[str, str | int] = {
            "filename": FILE_NAME,
            "rw": _RW[operation],
            "ioengine": self.ioengine,
            "bs": min(self.block_size, size_bytes),
            "iodepth": self.iodepth,
            "size": size_bytes,
            "direct": 1,
            "invalidate": 1,
            "numjobs": 1,
            "thread": 1,
            "fallocate": "native" if fallocate else "none",
        }
        if operation == "save":
            return options | {"end_fsync": 1, "refill_buffers": 1}
        return options | {"allow_file_create": 0}

    def size_for(self, size_bytes: int) -> int:
        """Return `size_bytes` rounded down to whole blocks; below one block, to 4 KiB."""
        unit = self.block_size if size_bytes >= self.block_size else _ALIGNMENT
        return size_bytes - size_bytes % unit

    def describe(self) -> dict[str, Any]:
        """Return the job for a result record."""
        # See `_start` about the pages.
        return {"name": self.name, **asdict(self), "refill_buffers": True, "huge_pages": True}


JOBS: tuple[FioJob, ...] = (
    FioJob(ioengine="io_uring", block_size=MIB, iodepth=32),
    FioJob(ioengine="io_uring", block_size=16 * MIB, iodepth=8),
    FioJob(ioengine="libaio", block_size=MIB, iodepth=32),
    FioJob(ioengine="psync", block_size=16 * MIB, iodepth=1),
)


@dataclass(frozen=True, kw_only=True)
class FioSample:
    """One run of one job. `elapsed_s` is fio's runtime: whole milliseconds, final fsync inside.

    `cpu_s` is user and system time of the job's thread over its whole run; helper threads of the
    kernel (io-wq) are not in it.
    """

    bytes: int
    elapsed_s: float
    cpu_s: float


@contextmanager
def started(
    job: FioJob,
    operation: Operation,
    directory: Path | str,
    size_bytes: int,
    *,
    fallocate: bool = True,
) -> Iterator[Callable[[], FioSample]]:
    """Start one job in `directory` on the file FILE_NAME, up to the begin of its clock.

    The yielded function lets it go on and returns what fio measured. A save writes a new file,
    syncs it and leaves it for restores; `cleanup` removes it. A restore reads at most the bytes of
    that file, after evicting it from the page cache. The bytes moved are `size_bytes` rounded down
    to whole blocks, and are in the sample.

    Raises FioError with fio's own message if fio is missing, the engine does not work here,
    the disk is full, or fewer bytes were moved. When the block raises, Ctrl-C included, fio is
    stopped and awaited, and a save removes its file.
    """
    directory = Path(directory)
    if operation == "restore":
        size_bytes = min(size_bytes, _evict(directory / FILE_NAME))
    size_bytes = job.size_for(size_bytes)
    if not size_bytes:
        raise FioError(f"fio {job.name}: the size is less than one block of {_ALIGNMENT} bytes")
    if operation == "save":
        _make_room(directory, size_bytes)
    options = job.options(operation, size_bytes, fallocate=fallocate)
    process: subprocess.Popen[str] | None = None

    def measure() -> FioSample:
        assert process is not None
        output, errors = process.communicate(_GO)
        return parse_output(job, operation, size_bytes, process.returncode, output, errors)

    try:
        with deferred_interrupts():  # inside Popen an interrupt would lose the child
            process = _start(options, directory)
        yield measure
    except BaseException:
        if process is not None:
            _stop(process)
        if operation == "save":
            cleanup(directory)
        raise


def cleanup(directory: Path | str) -> None:
    """Remove the file that save jobs leave in `directory`; nothing happens when there is none.

    Its space is freed in the background, see `deferred_free`.
    """
    path = Path(directory) / FILE_NAME
    with freed_later([path]):
        path.unlink(missing_ok=True)


def _make_room(directory: Path, size_bytes: int) -> None:
    """Remove the file of an earlier save and check that the new one fits.

    fio goes on writing when its preallocation fails, until the space is full; on tmpfs, the memory.
    """
    try:
        cleanup(directory)
        space = os.statvfs(directory)
    except OSError as error:
        raise FioError(f"fio in {directory}: {error.strerror or error}") from error
    free = space.f_bavail * space.f_frsize
    if size_bytes > free:
        raise FioError(
            f"fio in {directory}: {format_size(size_bytes)} asked, {format_size(free)} free"
        )


def _evict(path: Path) -> int:
    try:
        return evict_file(path)
    except OSError as error:
        raise FioError(
            f"fio cannot read {path}: {error.strerror or error}; a save job must come first"
        ) from error


def _start(options: Mapping[str, str | int], directory: Path) -> subprocess.Popen[str]:
    """Start fio in a new session: the terminal's Ctrl-C does not reach it.

    Its buffers are in transparent huge pages, like the writers' blocks: a request to the device
    holds more bytes of them. fio's own `iomem=mmaphuge` needs pages that root has reserved. The C
    library (2.35 or newer) asks for transparent ones by madvise(2), where the kernel allows that;
    seen in smaps_rollup.
    """
    tunables = [os.environ.get(_TUNABLES, ""), "glibc.malloc.hugetlb=1"]
    try:
        return subprocess.Popen(
            ["fio", *_OPTIONS, *(f"--{name}={value}" for name, value in options.items())],
            cwd=directory,
            env={**os.environ, _TUNABLES: ":".join(one for one in tunables if one)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise FioError(
            f"fio cannot be run in {directory}: {error.strerror or error} ({error.filename}); "
            "if it is missing: apt-get install fio"
        ) from error


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.communicate(timeout=_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def parse_output(
    job: FioJob, operation: Operation, size_bytes: int, status: int, output: str, errors: str
) -> FioSample:
    """Return the sample in fio's JSON, after any notes of fio. Raises FioError."""
    start = output.find("{\n")
    notes = (output[:start] if start >= 0 else output) + "\n" + errors
    try:
        document = json.JSONDecoder().raw_decode(output[start:])[0] if start >= 0 else {}
        record = document["jobs"][0]
        figures = record[_RW[operation]]
        moved, runtime_ms = int(figures["io_bytes"]), int(figures["runtime"])
        cpu = float(record["usr_cpu"]) + float(record["sys_cpu"])
        elapsed_ms, number = int(record["job_runtime"]), int(record["error"])
    except (ValueError, LookupError, TypeError) as error:
        raise FioError(f"fio {job.name} {operation}: {_reason(notes, status)}") from error
    # fio reports a failed final fsync in its text only, with error 0.
    if status or number or "end_fsync failed" in notes:
        why = _reason(notes, status)
        if number and os.strerror(number) not in why:
            why += f" ({os.strerror(number)})"
        raise FioError(f"fio {job.name} {operation}: {why}")
    if moved != size_bytes:
        raise FioError(f"fio {job.name} {operation}: moved {moved} of {size_bytes} bytes")
    return FioSample(
        bytes=moved, elapsed_s=max(runtime_ms, 1) / 1e3, cpu_s=cpu / 100 * elapsed_ms / 1e3
    )


def _reason(notes: str, status: int) -> str:
    """Return fio's lines that describe the error, joined to one."""
    lines = [line.strip().removeprefix("fio: ") for line in notes.splitlines()]
    said = "; ".join(dict.fromkeys(line for line in lines if line and _PRERUN not in line))
    if status < 0:
        return f"killed by {signal.Signals(-status).name}" + (f"; {said}" if said else "")
    return said or f"exit status {status}"
