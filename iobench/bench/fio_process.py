"""FioProcess: fio, which waits for its job, and then before its clock. Standby: the next one."""

from __future__ import annotations

import os
import subprocess
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

from iobench.bench.processes.interrupts import deferred_interrupts
from iobench.errors import FioError

__all__ = ["FioProcess", "Standby"]

_GRACE_S = 10.0  # how long fio may take to stop after SIGTERM, before it is killed
_BUSY_S = 1.0  # the longest wait for the next process to have started
# The comment sign hides the file to which fio sends the command's output.
_WAIT = "read go #"
_GO = "go\n"
_OPTIONS = (
    "--output-format=json",
    "--eta=never",
    "--disk_util=0",
    # The default is the processor's own counter, which a virtual machine may have to emulate.
    "--clocksource=clock_gettime",
    f"--exec_prerun={_WAIT}",
)

_TUNABLES = "GLIBC_TUNABLES"


def _environment() -> dict[str, str]:
    """Return the environment of fio, with its buffers in transparent huge pages.

    The writers' blocks are in huge pages too: a request to the device holds more bytes of them.
    fio's own `iomem=mmaphuge` needs pages that root has reserved. The C library (2.35 or newer)
    asks for transparent ones by madvise(2), where the kernel allows that; seen in smaps_rollup.
    """
    tunables = [os.environ.get(_TUNABLES, ""), "glibc.malloc.hugetlb=1"]
    return {**os.environ, _TUNABLES: ":".join(one for one in tunables if one)}


class FioProcess:
    """One process of fio in `directory`, for one job.

    It reads the job from a pipe, makes the job's file, and waits before its clock for `measure`.
    The file's name is relative to the directory, because fio splits names at colons. fio has a
    new session: the terminal's Ctrl-C does not reach it.
    """

    def __init__(self, directory: Path) -> None:
        """Raises FioError if fio cannot be run."""
        reader, self._job = os.pipe()
        _waiting.add(self)
        try:
            self._process = subprocess.Popen(
                ["fio", *_OPTIONS, f"/dev/fd/{reader}"],
                cwd=directory,
                env=_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
                pass_fds=[reader],
            )
        except OSError as error:
            self._close_job()
            raise FioError(
                f"fio cannot be run in {directory}: {error.strerror or error} ({error.filename}); "
                "if it is missing: apt-get install fio"
            ) from error
        finally:
            os.close(reader)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def give(self, options: Mapping[str, str | int]) -> None:
        """Give it the job, which it sets up at once."""
        lines = (f"{name}={value}\n" for name, value in options.items())
        with suppress(BrokenPipeError):  # it has ended; `measure` returns why
            os.write(self._job, f"[ceiling]\n{''.join(lines)}".encode())
        self._close_job()

    def measure(self) -> tuple[int, str, str]:
        """Let the clock begin. Return fio's exit status, standard output and errors."""
        output, errors = self._process.communicate(_GO)
        return self._process.returncode, output, errors

    def stop(self) -> None:
        """End it and wait for its end."""
        self._close_job()
        self._process.terminate()
        try:
            self._process.communicate(timeout=_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def wait_until_idle(self) -> None:
        """Wait until it uses neither CPU nor disk, because it waits for its job; 1 s at most."""
        deadline_s = time.monotonic() + _BUSY_S
        while not self.ended and not self._sleeps() and time.monotonic() < deadline_s:
            time.sleep(0.002)

    def _sleeps(self) -> bool:
        """Whether it waits for its job. While it starts it runs (R), or reads its libraries (D)."""
        with suppress(OSError):
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"
        return True  # there is nothing to look at

    def _close_job(self) -> None:
        job, self._job = self._job, -1
        if job >= 0:
            os.close(job)


_waiting: weakref.WeakSet[FioProcess] = weakref.WeakSet()


def _forget_all() -> None:
    for process in _waiting:
        process._close_job()


# fio reads its job up to the end of the pipe: a forked child must not keep it open.
os.register_at_fork(after_in_child=_forget_all)


class Standby:
    """Has the next process of fio ready: its start takes 0.1 s of CPU time before it reads a job.

    `start_next` is for a time in which nothing is measured. A process that is ready only waits.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._next: FioProcess | None = None

    def take(self) -> FioProcess:
        """Return the process that is ready, or a new one. Raises FioError."""
        process, self._next = self._next, None
        if process is not None and process.ended:
            process.stop()
            process = None
        return process or FioProcess(self._directory)

    def start_next(self) -> None:
        """Start the process for the next `take`, which reports it if there is none."""
        with suppress(FioError), deferred_interrupts():
            self._next = self._next or FioProcess(self._directory)

    def wait_until_idle(self) -> None:
        """Wait until the next process uses no CPU."""
        if self._next is not None:
            self._next.wait_until_idle()

    def close(self) -> None:
        """End the process that is ready."""
        process, self._next = self._next, None
        if process is not None:
            process.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
