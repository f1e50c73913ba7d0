"""Ends a run of tests that hangs, and goes on after a test that ended its worker."""

import faulthandler
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

_SHOWN = 10
_POLL_S = 1
_DUMPS_S = 1  # for the stacks of the workers
_SUMMARY_S = 30  # xdist waits 10 s for its workers


class WholeRun:
    """Plugin of the process that prints the reports. When no test begins or ends for `silence_s`,
    it names the running tests, prints the stacks of the workers, kills all children, and
    interrupts the run, which ends with a summary and exit code 2.

    pytest-timeout ends a test, in its own process. It can end neither a process whose Python does
    not run, nor a run in which a worker waits for tests and gets none.
    """

    def __init__(self, config: pytest.Config, silence_s: float) -> None:
        self._config = config
        self.silence_s = silence_s
        self.summary_s: float = _SUMMARY_S
        self._running: dict[str, float] = {}
        self._files: Any = None
        self._event_s = time.monotonic()
        self._finishes = False
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def pytest_sessionstart(self) -> None:
        self._thread = threading.Thread(target=self._watch, name="whole-run", daemon=True)
        self._thread.start()

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        self._finishes = True
        self._event_s = time.monotonic()

    def pytest_unconfigure(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()  # it may be about to kill children

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._event_s = self._running[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._end(nodeid)

    def pytest_collection_finish(self) -> None:
        self._event_s = time.monotonic()

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str) -> None:
        self._end(crashitem)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> object | None:
        """xdist runs the files of a worker that died again from the test that ended it. That test
        ends worker after worker, and the run stands still once the others were shut down."""
        if config.getvalue("dist") != "loadfile":
            return None
        from xdist.scheduler import LoadFileScheduling

        class Files(LoadFileScheduling):
            def remove_node(self, node: Any) -> str | None:
                files = self.assigned_work.pop(node)
                tests = [(file, name) for file in files for name in files[file]]
                left = [(file, name) for file, name in tests if not files[file][name]]
                if not left:
                    return None
                file, crashed = left[0]
                files[file][crashed] = True
                self.workqueue.update({file: files[file] for file, _ in left[1:]})
                for other in self.nodes:
                    self._reschedule(other)
                return crashed

        self._files = Files(config, log)
        return self._files

    def _waiting(self) -> list[str]:
        """The tests of which no worker has reported the end."""
        if self._files is None:
            return []
        work = [self._files.workqueue, *self._files.assigned_work.values()]
        tests = [item for files in work for tests in files.values() for item in tests.items()]
        return [name for name, ended in tests if not ended and name not in self._running]

    def _end(self, nodeid: str) -> None:
        self._running.pop(nodeid, None)
        self._event_s = time.monotonic()

    def _watch(self) -> None:
        while (left_s := self._event_s + self.silence_s - time.monotonic()) > 0:
            if self._ended.wait(min(left_s, _POLL_S)):
                return
        self._report()
        workers = _children(os.getpid())
        descendants = _descendants(os.getpid())
        if not self._finishes:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        for pid in workers:
            _kill(pid, signal.SIGABRT)  # pytest's faulthandler prints their stacks
        time.sleep(_DUMPS_S)
        for pid in descendants:
            _kill(pid, signal.SIGKILL)
        if not self._ended.wait(self.summary_s):  # a test has caught the interrupt
            os._exit(2)

    def _report(self) -> None:
        """Print to the terminal: the output of a test is captured, and would be lost."""
        if capture := self._config.pluginmanager.getplugin("capturemanager"):
            capture.suspend_global_capture(in_=True)
        now = time.monotonic()
        lines = [f"the run hangs: no test began or ended for {self.silence_s:.0f} s; running:"]
        lines += [f"{nodeid} (for {now - at:.0f} s)" for nodeid, at in [*self._running.items()]]
        if waiting := self._waiting():
            lines += [f"not run: {len(waiting)}, the first ones are", *waiting[:_SHOWN]]
        sys.stderr.write("\n".join(["", *lines, ""]))
        sys.stderr.flush()
        faulthandler.dump_traceback(sys.__stderr__ or 2)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):  # one that has ended
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            found += [int(child) for child in path.read_text().split()]
    return found


def _descendants(pid: int) -> list[int]:
    return [one for child in _children(pid) for one in (child, *_descendants(child))]


def _kill(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
