"""Sampler: a child process that reads counters of a device ten times a second."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from iobench.environment.blockdev import parse_stat

_PROGRAM = Path(__file__).with_name("sampling.py")
_INTERVAL_MS = 100


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The counters at `at_s` of time.perf_counter, unless documented otherwise."""

    at_s: float
    read_bytes: int
    write_bytes: int


class FileSampler:
    """The texts of small files, read ten times a second during the `with` block.

    A child process reads them. A thread would take CPU time and the GIL from the timed operation.
    The child writes to a memory file: no pipe can fill up, and no reader runs during the operation.
    """

    def __init__(self, files: Sequence[str]) -> None:
        self._files = files
        self._child: subprocess.Popen[bytes] | None = None
        self._output = -1

    def __enter__(self) -> Self:
        self._output = os.memfd_create("iobench-sampler", os.MFD_CLOEXEC)
        command = [sys.executable, "-I", "-S", str(_PROGRAM), str(_INTERVAL_MS), *self._files]
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=self._output, start_new_session=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is not None and self._child.stdin is not None:
            self._child.stdin.close()
            self._child.wait()
        os.close(self._output)

    def texts(self, since_s: float, until_s: float) -> list[tuple[float, list[str]]]:
        """Return (time, text of each file), strictly between two moments of perf_counter."""
        size = os.fstat(self._output).st_size
        lines = os.pread(self._output, size, 0).decode().splitlines(keepends=True)
        found = [line.rstrip("\n").split("\t") for line in lines if line.endswith("\n")]
        return [(float(at), texts) for at, *texts in found if since_s < float(at) < until_s]


class Sampler(FileSampler):
    """Readings of the counters of devices: bytes that they moved, for any process."""

    def __init__(self, device_files: Sequence[Path]) -> None:
        """`device_files` are the devices' stat files."""
        super().__init__([str(path) for path in device_files])

    def readings(self, since_s: float, until_s: float) -> list[Reading]:
        """Return the readings taken strictly between two moments of time.perf_counter."""
        found = [self._parse(at_s, texts) for at_s, texts in self.texts(since_s, until_s)]
        return [one for one in found if one is not None]

    def _parse(self, at_s: float, texts: list[str]) -> Reading | None:
        counters = [parse_stat(text) for text in texts]
        known = [one for one in counters if one is not None]
        if len(known) < len(counters):
            return None
        return Reading(
            at_s=at_s,
            read_bytes=sum(one.read_bytes for one in known),
            write_bytes=sum(one.write_bytes for one in known),
        )
