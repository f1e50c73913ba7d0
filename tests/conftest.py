"""Fixtures of all tests: a temporary directory, real file systems, and the command."""

from __future__ import annotations

import functools
import gc
import io
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import (
    AbstractContextManager,
    contextmanager,
    nullcontext,
    redirect_stderr,
    redirect_stdout,
)
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import pytest
import typer.main
from hypothesis import settings
from support.filesystems import Filesystems
from support.forked import in_child
from support.preloaded import run_preloaded
from support.pyuring_wheels import WHEELS_OF_PYURING

from iobench.cli.main import run as run_command
from iobench.environment.mounts import mount_of
from iobench.units import MIB
from iobench.writers.blocks.channel import Channel

if TYPE_CHECKING:
    from iobench.testing import LocalS3  # which imports torch, as support.s3_servers does

NOBODY = 65534  # the user without rights
# Of multiprocessing and torchrun, removed by their process unless it is killed; torch's cache.
_NOT_OURS = ("pymp-", "torchelastic_", "torchinductor_")

# Operators that torch compiles, such as DeepSpeed's: scripts/setup builds them here. In the user's
# cache, which all checkouts share, a build of another environment would begin anew in a test.
os.environ.setdefault("TORCH_EXTENSIONS_DIR", os.path.join(sys.prefix, "torch_extensions"))
# With the same ninja as the setup: another version would build them again, for minutes.
os.environ["PATH"] = os.path.join(sys.prefix, "bin") + os.pathsep + os.environ["PATH"]

# Direct I/O, the page cache and full disks are tested on a disk: Debian 13 has a tmpfs on /tmp.
if (_mount := mount_of(Path(tempfile.gettempdir()))) and _mount.kind == "tmpfs":
    os.environ["TMPDIR"] = os.environ["PYTEST_DEBUG_TEMPROOT"] = "/var/tmp"
    tempfile.tempdir = None

# One thread of torch, also in children: two tests run at a time, and threads that share a busy core
# wait for each other longer than such small tensors take. Before anything imports torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# typer builds all verbs for each command that a test runs here, in 35 ms. They keep no state.
typer.main.get_command = functools.cache(typer.main.get_command)

settings.register_profile("iobench", deadline=None)  # timings never decide a test
settings.load_profile("iobench")

MakeFilesystem = Callable[..., Path]
Command = Callable[..., "subprocess.CompletedProcess[str]"]


def pytest_configure(config: pytest.Config) -> None:
    """Let commands be interrupted also where the tests run in the background, or under nohup: a
    shell starts those with SIGINT or SIGHUP ignored, and every child inherits that."""
    if not WHEELS_OF_PYURING:
        expected = "ignore:uring is not available here:RuntimeWarning"
        config.addinivalue_line("filterwarnings", expected)
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_collection_finish() -> None:
    """Freeze modules and tests for the garbage collector: with torch each collection takes 0.1 s
    otherwise."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> None:
    """Freeze what the tests before have imported and kept: checks for leaks collect often."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def temporary_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Directory for the temporary files of all tests and of their children. Like /tmp, every user
    can write to it. It is removed at the end, with the files of killed children."""
    tmp_path_factory.getbasetemp()  # that of tmp_path stays where pytest keeps it
    with tempfile.TemporaryDirectory(prefix="iobench-tests-") as name:
        os.chmod(name, 0o1777)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TMPDIR", name)
            patch.setattr(tempfile, "tempdir", name)
            yield Path(name)
            if servers := sys.modules.get("support.s3_servers"):
                servers.end_servers()


@pytest.fixture(autouse=True)
def _no_temporary_files(temporary_directory: Path) -> Iterator[None]:
    """Fail a test that leaves temporary files behind, itself or in a child process."""
    before = {*os.listdir(temporary_directory)}
    yield
    left = {*os.listdir(temporary_directory)} - before
    left = {name for name in left if not name.startswith(_NOT_OURS)}
    assert not left, f"temporary files were left: {sorted(left)}"


@pytest.fixture(autouse=True)
def _no_blocked_signals() -> Iterator[None]:
    """Fail a test that changes the signals of this process."""
    before = _signals()
    yield
    after = _signals()
    _, blocked = before
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    assert after == before


def _signals() -> tuple[dict[signal.Signals, object], set[signal.Signals]]:
    """The handlers of the signals that end a process, and the blocked signals."""
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    return handlers, {*signal.pthread_sigmask(signal.SIG_BLOCK, ())}


@pytest.fixture
def as_nobody() -> Callable[[Callable[[], None]], None]:
    """Run a function in a forked child without privileges; its failure is that of the test. The
    modules that it imports must be loaded before: some code can only be read by root."""
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")

    def run(action: Callable[[], None]) -> None:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        action()

    return lambda action: in_child(lambda: run(action))


@pytest.fixture
def runs() -> Iterator[Path]:
    """A directory in memory, where syncs take no time."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as made:
        yield Path(made)


@pytest.fixture
def sticky() -> Iterator[Path]:
    """A directory like /tmp: every user may create files there and remove their own."""
    with tempfile.TemporaryDirectory(prefix="iobench-sticky-") as name:
        os.chmod(name, 0o1777)
        yield Path(name)


@pytest.fixture(scope="session")
def shared_filesystems(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeFilesystem]:
    """Makes file systems that live as long as the test session."""
    with _filesystems(tmp_path_factory) as make:
        yield make


@pytest.fixture
def new_filesystem(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeFilesystem]:
    """Makes file systems that live as long as one test, which may break them."""
    with _filesystems(tmp_path_factory) as make:
        yield make


@contextmanager
def _filesystems(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeFilesystem]:
    filesystems = Filesystems(tmp_path_factory.mktemp("mounts"))

    def make(kind: str, size_bytes: int = 512 * MIB) -> Path:
        try:
            return filesystems.make(kind, size_bytes)
        except OSError as error:
            pytest.skip(f"no {kind} can be mounted here: {error}")

    try:
        yield make
    finally:
        filesystems.undo()


@pytest.fixture
def impatience() -> Callable[[threading.Event], AbstractContextManager[None]]:
    """`with impatience(event):` Ctrl-C hits the first two waits for a thread; then the event is
    set. The signals are real. Each is sent while this thread is inside a join, or a wait of a
    Channel. The block raises KeyboardInterrupt."""
    return _impatient


@contextmanager
def _impatient(event: threading.Event) -> Iterator[None]:
    handled, left, done = threading.Semaphore(0), threading.Event(), threading.Event()
    sent = threading.Event()
    main = threading.get_ident()

    def handle(number: int, frame: FrameType | None) -> None:
        if sent.is_set():  # else it is the same signal, sent once more
            sent.clear()
            handled.release()
            raise KeyboardInterrupt

    def joining() -> FrameType | None:
        frame = sys._current_frames().get(main)
        while frame is not None:
            own, name = frame.f_locals.get("self"), frame.f_code.co_name
            if name == "join" and isinstance(own, threading.Thread):
                break
            if name == "_pause" and isinstance(own, Channel):
                break
            frame = frame.f_back
        return frame

    def send() -> None:
        seen: list[FrameType | None] = [None]
        while len(seen) < 4 and not left.wait(0.001):
            found = joining()
            if found in seen:
                continue
            seen.append(found)
            if len(seen) == 4:
                event.set()
            else:
                sent.set()
                signal.pthread_kill(main, signal.SIGINT)
                # A signal just before the wait begins interrupts nothing, so it is sent again.
                while not handled.acquire(timeout=0.1) and not left.is_set():
                    signal.pthread_kill(main, signal.SIGINT)
        done.set()

    before = signal.signal(signal.SIGINT, handle)
    threading.Thread(target=send).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        sent.clear()
        left.set()
        done.wait(10)
        signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def rclone() -> Iterator[LocalS3]:
    """rclone's server, in use by this process."""
    from support.s3_servers import s3_server

    with s3_server("rclone") as running, running.active():
        yield running


@pytest.fixture(scope="module")
def moto() -> Iterator[LocalS3]:
    """moto's server, in use by this process."""
    from support.s3_servers import s3_server

    with s3_server("moto") as running, running.active():
        yield running


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """The empty directory in which commands run."""
    made = tmp_path / "here"
    made.mkdir()
    return made


@pytest.fixture
def iobench(here: Path) -> Command:
    """Run `iobench` in a process of its own, by default in an empty directory."""

    def run(
        *arguments: str | Path, cwd: Path = here, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        command = ["-m", "iobench", *arguments]
        return run_preloaded(command, cwd=cwd, env=os.environ | environment)

    return run


@pytest.fixture
def iobench_inside(here: Path) -> Command:
    """The same command in this process, where torch is imported already and has one thread. A
    process of its own takes 0.3 s more, and 1 to 3 s if it does the imports. It is needed for tests
    of signals, terminals and imports. Here no wait for an idle device is made between samples."""
    import torch

    from iobench.bench.targets import base

    def run(
        *arguments: str | Path, cwd: Path = here, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        stdout, stderr = io.StringIO(), io.StringIO()
        asked = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
        handlers = [signal.getsignal(number) for number in asked]
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(1)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sys, "argv", ["iobench", *map(str, arguments)])
                patch.setattr(base, "settled", lambda *_: nullcontext())
                patch.chdir(cwd)
                for name, value in environment.items():
                    patch.setenv(name, value)
                with redirect_stdout(stdout), redirect_stderr(stderr):
                    run_command()
        except SystemExit as ended:
            code = ended.code or 0
        finally:
            torch.set_num_threads(threads)
            for number, handler in zip(asked, handlers, strict=True):
                signal.signal(number, handler)
            # An interrupted command blocks these signals until its process ends.
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        assert isinstance(code, int)
        return subprocess.CompletedProcess(sys.argv, code, stdout.getvalue(), stderr.getvalue())

    return run
