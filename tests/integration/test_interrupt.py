"""A run that is interrupted or killed, at any moment, and what is there afterwards."""

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.preloaded import Preloaded, run_preloaded

from iobench.bench.fio import FILE_NAME
from iobench.bench.targets.directory import PREFIX
from iobench.checkpoint.store import STAGING_SUFFIX
from iobench.environment import fio_version
from iobench.formats.safetensors_header import header_bytes
from iobench.results import read
from iobench.units import GIB

Command = Callable[..., "subprocess.CompletedProcess[str]"]
Run = Preloaded

_PLAN = re.compile(
    r"(workload|scaled|files|writers|processes|target|run) +|\d+ .* (save|restore): "
)
_PATIENCE_S = 200

needs_fio = pytest.mark.skipif(fio_version() is None, reason="fio is not installed")


def wait_for(condition: Callable[[], bool], process: Run) -> None:
    """Poll until `condition` holds; fails when the process ends before."""
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.001)


def there(target: Path, pattern: str) -> bool:
    return any(target.glob(f"{PREFIX}*/{pattern}"))


def at_start(target: Path) -> bool:
    """The scratch directory was made."""
    return any(target.glob(f"{PREFIX}*"))


def in_save(target: Path) -> bool:
    """A checkpoint is being written, aside."""
    return there(target, f".*{STAGING_SUFFIX}/*")


def in_restore(target: Path) -> bool:
    """A checkpoint is published, and not removed yet."""
    return there(target, "step-*/manifest.json")


def in_fio(target: Path) -> bool:
    """fio has begun with its file."""
    return there(target, FILE_NAME)


def processes_in(directory: Path) -> list[str]:
    """The names of the processes whose current directory is, or was, below `directory`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended since
            if os.readlink(process / "cwd").startswith(str(directory)):
                found.append((process / "comm").read_text().strip())
    return found


def state_and_parent(pid: int) -> tuple[str, int]:
    """As /proc/PID/stat shows them; `Z` for one that is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "Z", 0
    return fields[0], int(fields[1])


def children_of(parent: int) -> list[int]:
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if state_and_parent(pid)[1] == parent]


def is_alive(pid: int) -> bool:
    return state_and_parent(pid)[0] not in "ZX"


@pytest.fixture
def start(target: Path, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Starts a long run of 100 MiB; its record is run.jsonl."""
    started: list[Run] = []

    def begin(*arguments: str, size: tuple[str, ...] = ("--size", "100MiB")) -> Run:
        process = Preloaded(
            [
                *("-m", "iobench", "run"),
                *("-w", "llama7b", *size, "--target", target),
                *("--repeat", "1000", "-o", tmp_path / "run.jsonl", *arguments),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=tmp_path,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def check_interrupted(process: Run, target: Path, record: Path) -> None:
    """Exit 130, what was measured, an empty target, no process left, and a record that says so."""
    stdout, stderr = process.communicate(timeout=_PATIENCE_S)
    assert process.returncode == 130, stderr
    measured = bool(read(record).samples)
    stopped = rf"Stopped: {re.escape(str(record))}: the run was interrupted; \d+ samples were "
    assert bool(re.match(stopped, stdout)) == measured
    assert bool(stdout) == measured
    lines = [line for line in stderr.splitlines() if not _PLAN.match(line)]
    assert lines[-1] == "iobench: interrupted; temporary files are removed"
    assert lines[:-1] == ([f"record: {record}"] if measured else [])
    assert os.listdir(target) == []
    assert processes_in(target) == []
    end = read(record).end
    assert end.status == "interrupted"


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        (in_save, signal.SIGINT),
        (in_save, signal.SIGTERM),
        (in_restore, signal.SIGHUP),  # as when a connection breaks
        pytest.param(in_fio, signal.SIGTERM, marks=needs_fio),
    ],
)
def test_one_signal_is_enough(start, target, tmp_path, moment, number) -> None:
    """One of the three, whatever is going on, ends the run and removes everything."""
    ceiling = "--fio" if moment is in_fio else "--no-fio"
    process = start("--writer", "odirect,threads=4", ceiling)
    wait_for(lambda: moment(target), process)
    process.send_signal(number)
    check_interrupted(process, target, tmp_path / "run.jsonl")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_processes_side_by_side_end_with_the_run(start, target, tmp_path, number) -> None:
    """Interrupted or killed, the run takes its processes with it: none writes any more."""
    process = start("--writer", "buffered", "--no-fio", "--numjobs", "2")
    wait_for(lambda: there(target, f".*{STAGING_SUFFIX}/job-1/*"), process)
    children = children_of(process.pid)
    # What a killed process leaves among its temporary files is removed with the run's directory.
    jobs = [pid for pid in children if "local_rank" in Path(f"/proc/{pid}/cmdline").read_text()]
    temporary = f"TMPDIR={target}/.iobench-run-".encode()
    assert all(temporary in Path(f"/proc/{pid}/environ").read_bytes() for pid in jobs)
    assert len(jobs) == 1  # the run itself is the other one
    process.send_signal(number)
    if number == signal.SIGINT:
        check_interrupted(process, target, tmp_path / "run.jsonl")
    else:
        process.communicate(timeout=_PATIENCE_S)
    deadline = time.monotonic() + _PATIENCE_S
    while any(is_alive(pid) for pid in children):
        assert time.monotonic() < deadline, "a process outlived its run"
        time.sleep(0.01)


@pytest.mark.parametrize("moment", [at_start, in_save, pytest.param(in_fio, marks=needs_fio)])
def test_impatience_does_no_harm(start, target, tmp_path, moment) -> None:
    """Signal upon signal while it cleans up changes nothing of how it ends."""
    process = start("--writer", "buffered,odirect")
    wait_for(lambda: moment(target) and (tmp_path / "run.jsonl").stat().st_size > 0, process)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    sent = 0
    while process.poll() is None and sent < 1000:
        process.send_signal(numbers[sent % len(numbers)])
        sent += 1
        time.sleep(0.002)
    check_interrupted(process, target, tmp_path / "run.jsonl")


def test_an_interrupt_while_it_plans(start, target, tmp_path) -> None:
    """During the probes that find a size, before there is a record, nothing is left either."""
    process = start("--writer", "buffered,odirect", size=())
    wait_for(lambda: there(target, "*probe*"), process)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=_PATIENCE_S)
    assert process.returncode == 130
    assert stderr == "iobench: interrupted; temporary files are removed\n"
    assert os.listdir(target) == []
    assert not (tmp_path / "run.jsonl").exists()


_LOSING = """
import os, signal, sys
from iobench.cli import main
from iobench.writers.buffered import BufferedWriter as Buffered

class Lost:
    def __del__(self):  # Python drops what is raised here
        os.kill(os.getpid(), signal.SIGHUP)
        [None for _ in range(100)]

def read(self, *arguments):
    Lost()
    return real(self, *arguments)

real, Buffered.read_many = Buffered.read_many, read
main.run()
"""


def test_an_interrupt_that_gets_lost(tiny_path, target, tmp_path) -> None:
    """If Python drops the exception of the signal handler, the run ends before its next step."""
    done = run_preloaded(
        [
            *("-c", _LOSING, "run", "-w", tiny_path, "--target", target),
            *("--writer", "buffered", "--no-fio", "--repeat", "1000", "-o", "run.jsonl"),
        ],
        timeout=_PATIENCE_S,
        cwd=tmp_path,
    )
    ignored = "Exception ignored (in:|while calling deallocator) <function Lost.__del__"  # 3.14's
    assert re.search(ignored, done.stderr)
    assert done.stderr.endswith("iobench: interrupted; temporary files are removed\n")
    assert done.returncode == 130
    assert os.listdir(target) == []


_NOHUP = """
import signal
signal.signal(signal.SIGHUP, signal.SIG_IGN)
from iobench.cli import main
main.run()
"""


def test_nohup_is_honoured(tiny_path, target, tmp_path) -> None:
    """A run that ignores SIGHUP goes on when it comes."""
    process = Preloaded(
        [
            *("-c", _NOHUP, "run", "-w", tiny_path, "--target", target),
            *("--writer", "buffered", "--no-ceiling", "--repeat", "3", "--size", "full"),
            *("-o", tmp_path / "run.jsonl"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    wait_for(lambda: at_start(target), process)
    process.send_signal(signal.SIGHUP)
    _, stderr = process.communicate(timeout=_PATIENCE_S)
    assert process.returncode == 0, stderr
    assert read(tmp_path / "run.jsonl").incomplete is None


@pytest.fixture
def another_run(iobench_inside: Command, tiny_path: Path, target: Path) -> Callable[[Path], None]:
    """Makes one more run on the same target, which writes the given record."""

    def run(record: Path) -> None:
        done = iobench_inside(
            *("run", "-w", tiny_path, "--target", target, "--writer", "buffered"),
            *("--size", "full", "--no-fio", "--repeat", "1", "-o", record),
        )
        assert done.returncode == 0, done.stderr

    return run


def test_a_killed_runs_files_go_with_the_next_run(
    start, another_run, iobench_inside, target, tmp_path
) -> None:
    """kill -9 leaves a directory and a record without end; the next run clears the one away."""
    process = start("--writer", "buffered", "--no-fio")
    wait_for(lambda: in_restore(target), process)
    process.kill()
    process.communicate()
    (left,) = target.iterdir()
    assert left.name.startswith(PREFIX)
    shown = iobench_inside("show", tmp_path / "run.jsonl")
    assert shown.returncode == 0
    assert "the run was killed or is still running" in shown.stderr
    another_run(tmp_path / "next.jsonl")
    assert os.listdir(target) == []


def test_two_runs_at_once(start, another_run, target, tmp_path) -> None:
    """A run does not take a live run's files for a killed one's."""
    process = start("--writer", "buffered", "--no-fio")
    wait_for(lambda: in_restore(target), process)
    another_run(tmp_path / "other.jsonl")
    assert len(os.listdir(target)) == 1
    process.send_signal(signal.SIGINT)
    check_interrupted(process, target, tmp_path / "run.jsonl")


@pytest.mark.parametrize("verb", ["verify", "export"])
def test_a_checkpoint_is_read(verb: str, tmp_path) -> None:
    """Ctrl-C while `verify` or `export` does: one line, and no file is left.

    It reads a hole of 64 GiB: no disk would be fast enough to end it before the signal.
    """
    source, out = tmp_path / "large.safetensors", tmp_path / "out"
    size = (64 if verb == "verify" else 4) * GIB
    header, _ = header_bytes([("w", "uint8", (size,))], {})
    source.write_bytes(header)
    os.truncate(source, len(header) + size)
    process = Preloaded(
        ["-m", "iobench", verb, source, *(["-o", out] if verb == "export" else [])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )

    def reads() -> bool:
        with contextlib.suppress(OSError):  # closed meanwhile
            opened = [os.readlink(one) for one in Path(f"/proc/{process.pid}/fd").iterdir()]
            begun = verb == "verify" or any(out.parent.glob(".out*/*"))
            return begun and str(source) in opened
        return False

    wait_for(reads, process)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=_PATIENCE_S)
    assert (process.returncode, stdout) == (130, "")
    assert stderr == "iobench: interrupted; temporary files are removed\n"
    assert [one.name for one in tmp_path.iterdir()] == [source.name]
