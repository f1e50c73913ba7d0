"""FioProcess: fio, which waits for its job, and then before its clock."""

from __future__ import annotations

import os
import subprocess
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from iobench.errors import FioError

__all__ = ["FioProcess"]

_GRACE_S = 10.0  # how long fio may take to stop after SIGTERM, before it is killed
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
