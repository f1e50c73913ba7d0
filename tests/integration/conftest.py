"""The real command in a process of its own, a tiny workload, and a real file system to run on."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from iobench.cli.main import run as run_command

Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def tiny_path() -> Path:
    """A workload of 6 MiB: raw, safetensors and torch files of rank 0, one raw file of rank 1."""
    return Path(__file__).with_name("tiny.yaml")


@pytest.fixture
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """An empty directory on an ext4 that no other test uses; else any directory.

    Its results go elsewhere, so that it must be empty again after every command.
    """
    if os.geteuid() != 0:
        made = tmp_path / "target"
    else:
        make = request.getfixturevalue("shared_filesystems")
        made = _ext4(make) / tmp_path.name
    made.mkdir()
    return made


_made: dict[str, Path] = {}


def _ext4(make: Callable[..., Path]) -> Path:
    if "ext4" not in _made:
        _made["ext4"] = make("ext4", 1024 * 2**20)
    return _made["ext4"]


@pytest.fixture
def iobench(tmp_path: Path) -> Command:
    """Runs `iobench` with the given arguments, by default in an empty directory."""
    here = tmp_path / "here"
    here.mkdir()

    def run(
        *arguments: str | Path, cwd: Path = here, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-W", "error::ResourceWarning", "-m", "iobench", *arguments],
            cwd=cwd,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


@pytest.fixture
def iobench_inside(monkeypatch: pytest.MonkeyPatch) -> Command:
    """The same command in this process, where torch is imported already and has one thread."""
    import torch

    threads = torch.get_num_threads()

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["iobench", *map(str, arguments)])
        stdout, stderr = io.StringIO(), io.StringIO()
        asked = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = [signal.getsignal(number) for number in asked]
        try:
            torch.set_num_threads(1)
            with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
                run_command()
        except SystemExit as ended:
            code = ended.code or 0
        finally:
            torch.set_num_threads(threads)
            for number, handler in zip(asked, before, strict=True):
                signal.signal(number, handler)
        assert isinstance(code, int)
        return subprocess.CompletedProcess(sys.argv, code, stdout.getvalue(), stderr.getvalue())

    return run
