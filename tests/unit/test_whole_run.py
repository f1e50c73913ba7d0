"""A run of tests that hangs ends, and names the test; a test that ends its worker runs once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # each starts pytest and its workers

_CONFTEST = """
from support.whole_run import WholeRun

def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(WholeRun(config, silence_s=100), "whole-run")
        config.pluginmanager.register(Shorten(config))

class Shorten:  # how long the start of pytest takes does not matter
    def __init__(self, config):
        self.run = config.pluginmanager.getplugin("whole-run")

    def pytest_runtest_logstart(self, nodeid):
        if nodeid.endswith("test_hangs"):
            self.run.silence_s = 2
            self.run.summary_s = SUMMARY_S
"""
_PASSES = """
import pytest

@pytest.mark.parametrize("number", range(4))
def test_passes(number):
    pass
"""
_HANGS = (
    _PASSES
    + """
import pathlib, subprocess, time

def test_hangs(pytestconfig):
    child = subprocess.Popen(["sleep", "1000"])
    (pytestconfig.rootpath / "child").write_text(str(child.pid))
    try:
        time.sleep(1000)
    except BaseException:
        CAUGHT
"""
)
_CRASHES = """
import os, pytest

@pytest.mark.parametrize("number", range(6))
def test_crashes(number):
    with open("begun", "a") as file:
        print(number, file=file)
    if number in (2, 5):
        os._exit(1)
"""


def _run(
    directory: Path, *arguments: str, summary_s: int = 60, **files: str
) -> subprocess.CompletedProcess[str]:
    """Run pytest as the Makefile does, in a process of its own, over these files."""
    files["conftest"] = _CONFTEST.replace("SUMMARY_S", str(summary_s))
    for name, text in files.items():
        (directory / f"{name}.py").write_text(text)
    (directory / "pytest.ini").write_text("[pytest]\n")
    support = Path(__file__).parents[1]
    command = ["-m", "pytest", "--dist", "loadfile", "--no-loadscope-reorder", *arguments]
    return subprocess.run(
        [sys.executable, *command, "-p", "no:timeout", f"--basetemp={directory / 'base'}"],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": str(support)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("workers", ["2", pytest.param("0", marks=pytest.mark.exhaustive)])
def test_a_test_that_hangs_is_named(tmp_path: Path, workers: str) -> None:
    """With its stack; the summary comes too, and no child is left."""
    done = _run(tmp_path, "-n", workers, test_hangs=_HANGS.replace("CAUGHT", "raise"))
    assert done.returncode == 2, done.stdout + done.stderr
    assert re.search(r"hangs: no test began .*\ntest_hangs\.py::test_hangs \(for", done.stderr)
    assert re.search(r'test_hangs\.py", line \d+ in test_hangs', done.stderr)
    assert re.search(r"4 passed.* in ", done.stdout)
    child = int((tmp_path / "child").read_text())
    until_s = time.monotonic() + 60
    while _is_running(child) and time.monotonic() < until_s:  # it was killed a moment ago
        time.sleep(0.01)
    assert not _is_running(child)


@pytest.mark.exhaustive
def test_a_test_that_cannot_be_interrupted_is_ended(tmp_path: Path) -> None:
    """There is no summary then."""
    text = _HANGS.replace("CAUGHT", "time.sleep(1000)")
    done = _run(tmp_path, "-n", "0", summary_s=1, test_hangs=text)
    assert done.returncode == 2
    assert "test_hangs.py::test_hangs (for" in done.stderr


def test_a_test_that_ends_its_worker_runs_once(tmp_path: Path) -> None:
    """All others run: those of its file too, and the last one of all may be such a test."""
    done = _run(tmp_path, "-n", "2", test_passes=_PASSES, test_crashes=_CRASHES)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 failed, 8 passed" in done.stdout
    for number in (2, 5):
        assert f"crashed while running 'test_crashes.py::test_crashes[{number}]'" in done.stdout
    assert sorted((tmp_path / "begun").read_text().split()) == [*"012345"]
    assert "hangs" not in done.stderr


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
