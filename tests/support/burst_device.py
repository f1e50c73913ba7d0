"""A device with burst credits: a control group's limit of writes, which drops after a while.

    PYTHONPATH=tests python -m support.burst_device DIRECTORY DURATION

lets saves follow each other in DIRECTORY, on a file system of its own, and prints the rates that
iobench found next to the limits.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from iobench.units import MIB
from support.control_groups import ControlGroup, control_group

_POLL_S = 0.02
_BEGUN_BYTES = MIB  # written: the first save has begun, more than metadata


@dataclass(frozen=True)
class BurstDevice:
    """The limit of a device for the processes of a group. One limit holds for all writes."""

    group: ControlGroup
    device: str

    def run(
        self, command: Sequence[str], *, fast: int, slow: int, burst_s: float
    ) -> subprocess.CompletedProcess[str]:
        """Run `command` in the group. Its writes are limited to `fast` bytes per second, and to
        `slow` from `burst_s` after the first of them."""
        self.group.limit(fast)
        joined = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.group.path / "cgroup.procs")]
        ended = threading.Event()
        drop = threading.Thread(target=self._drop, args=(slow, burst_s, ended))
        drop.start()
        try:
            return subprocess.run([*joined, *command], capture_output=True, text=True, check=False)
        finally:
            ended.set()
            drop.join()

    def _drop(self, slow: int, burst_s: float, ended: threading.Event) -> None:
        before = self._written()
        while self._written() < before + _BEGUN_BYTES:
            if ended.wait(_POLL_S):
                return
        if not ended.wait(burst_s):
            self.group.limit(slow)

    def _written(self) -> int:
        stat = Path(f"/sys/dev/block/{self.device}/stat").read_text().split()
        return 512 * int(stat[6])


@contextmanager
def burst_device(directory: Path) -> Iterator[BurstDevice]:
    """Make a group whose writes to the device of `directory` can be limited."""
    number = os.stat(directory).st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    versions = (
        (Path("/sys/fs/cgroup/blkio"), "blkio.throttle.write_bps_device", f"{device} {{}}"),
        (Path("/sys/fs/cgroup"), "io.max", f"{device} wbps={{}}"),
    )
    with control_group(MIB, versions) as group:
        yield BurstDevice(group, device)


def _main(directory: Path, duration: str) -> None:
    fast, slow, burst_s = 40 * MIB, 10 * MIB, 30.0
    command = [sys.executable, "-m", "iobench", "run", "--size", "160MiB", "--writer", "odirect"]
    command += ["--target", str(directory), "--duration", duration, "--format", "json"]
    with burst_device(directory) as device:
        done = device.run(command, fast=fast, slow=slow, burst_s=burst_s)
    sys.stderr.write(done.stderr)
    over_time: dict[str, Any] = json.loads(done.stdout)["summaries"][0]["over_time"]
    change = over_time["change"]
    before, after = change["before_bytes_per_s"] / fast, change["after_bytes_per_s"] / slow
    sys.stdout.write(
        f"limits: {fast // MIB} MiB/s for {burst_s:.0f} s, then {slow // MIB} MiB/s\n"
        f"before: {before:.1%} of its limit, after: {after:.1%} of its limit\n"
    )


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2])
