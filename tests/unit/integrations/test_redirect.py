"""The parts of the redirect by themselves: watching imports, replacing names, counting, and the
summary."""

from __future__ import annotations

import errno
import importlib
import importlib.util
import json
import os
import re
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from support.reentry import at_every_collection

from iobench.cli.exec import _try_here
from iobench.errors import TransferError, UnavailableError, UsageError
from iobench.integrations import replacing
from iobench.integrations.redirect.call_counts import CallCounts, Count, Function, merged
from iobench.integrations.redirect.launch import ExecOutcome, launch, summary, write_report
from iobench.integrations.redirect.patches import Redirect
from iobench.integrations.redirect.process import Watch
from iobench.integrations.stock_path import Unsupported
from iobench.writers.base import Availability
from iobench.writers.buffered import BufferedWriter
from iobench.writers.registry import make
from iobench.writers.transfer import Transfer


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory to import from."""
    before = {*sys.modules}
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in {*sys.modules} - before:
        del sys.modules[name]
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Watch)]


def test_a_module_is_changed_as_soon_as_it_is_there(modules: Path) -> None:
    """Whoever takes a name from it later has the new one; loader and source stay its own."""
    (modules / "stocked.py").write_text("def save(): return 'stock'\n")
    (modules / "user.py").write_text("from stocked import save\n")
    seen: list[str] = []

    def action(module: ModuleType) -> None:
        seen.append(module.__name__)
        module.save = lambda: "ours"

    Watch({"stocked": action, "absent": action}).begin()
    assert importlib.util.find_spec("stocked") is not None  # looked for, and not imported
    user = importlib.import_module("user")
    assert user.save() == "ours"
    assert seen == ["stocked"]
    stocked = sys.modules["stocked"]
    assert type(stocked.__loader__).__name__ == "SourceFileLoader"
    assert "exec_module" not in vars(stocked.__loader__)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("absent")


def test_a_module_that_fails_to_import_can_be_tried_again(modules: Path) -> None:
    """Its error is its own, and the second time counts."""
    (modules / "broken.py").write_text("raise ValueError('no')\n")
    seen: list[ModuleType] = []
    Watch({"broken": seen.append}).begin()
    with pytest.raises(ValueError, match="no"):
        importlib.import_module("broken")
    (modules / "broken.py").write_text("value = 1  # of another length\n")
    importlib.invalidate_caches()
    assert importlib.import_module("broken").value == 1
    assert len(seen) == 1


def test_what_is_imported_already_is_changed_at_once(modules: Path) -> None:
    """As for a script that is redirected late."""
    (modules / "early.py").write_text("")
    importlib.import_module("early")
    seen: list[ModuleType] = []
    Watch({"early": seen.append}).begin()
    assert [module.__name__ for module in seen] == ["early"]


def test_tallies_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a process and its forked child, and of problems; examples are the first. Each call is a
    line of JSON. One that was cut short, by a full disk, is left out. Without the directory, as
    after `iobench exec` was killed, nothing is counted."""
    one, other = CallCounts(tmp_path), CallCounts(tmp_path)
    one.add(
        "f", "redirected", Count(calls=1, bytes=10, seconds=0.5, example="a"), fallbacks=["x -> y"]
    )
    one.add(
        "f", "redirected", Count(calls=1, bytes=5, seconds=0.5, example="b"), fallbacks=["x -> y"]
    )
    other.add("f", "stock", Count(calls=1, seconds=1.0, example="c"), reason="because")
    other.add("g", "failed", Count(calls=1, seconds=2.0, example="d"))
    with (tmp_path / "calls.jsonl").open("a") as file:
        file.write('{"problem": "no iobench"}\n' * 2)
    if (child := os.fork()) == 0:
        one.add("f", "redirected", Count(calls=1, bytes=1, seconds=0.25, example="e"))
        os._exit(0)
    os.waitpid(child, 0)
    functions, problems, processes = merged(tmp_path)
    assert processes == 2
    assert problems == ["no iobench"]
    assert functions["f"].redirected.calls == 3
    assert functions["f"].redirected.bytes == 16
    assert functions["f"].redirected.seconds == pytest.approx(1.25)
    assert functions["f"].fallbacks == {"x -> y": 2}
    assert functions["f"].stock["because"] == Count(calls=1, seconds=1.0, example="c")
    assert functions["g"].failed.calls == 1
    calls = (tmp_path / "calls.jsonl").read_bytes()
    assert json.loads(calls.splitlines()[0])["pid"] == os.getpid()
    (tmp_path / "calls.jsonl").write_bytes(calls[:-10])
    assert merged(tmp_path)[0]["f"].redirected.calls == 2
    gone = CallCounts(tmp_path / "gone")
    gone.add("f", "redirected", Count(calls=1))
    assert capsys.readouterr().err == ""
    assert not (tmp_path / "gone").exists()


def test_a_report_is_not_written_through_what_others_planted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither at a name that can be foreseen nor at that of the report; whole or not at all."""

    def no_space(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    victim = tmp_path / "victim"
    victim.write_text("old")
    report = tmp_path / "rep.json"
    for name in (".rep.json.part", ".rep.json.00000000", report.name):
        (tmp_path / name).symlink_to(victim)
    with monkeypatch.context() as foreseen:
        foreseen.setattr(secrets, "token_hex", lambda n: "0" * 2 * n)
        with pytest.raises(FileExistsError):
            write_report(report, {"a": 1})
    assert report.is_symlink()
    write_report(report, {"a": 1})
    assert json.loads(report.read_text()) == {"a": 1}
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        write_report(report, {"a": 2})
    assert json.loads(report.read_text()) == {"a": 1}
    assert sorted(tmp_path.iterdir()) == before
    assert victim.read_text() == "old"


def _stock(*arguments: object) -> None:
    raise AssertionError(f"stock was asked for {arguments}")


def test_an_object_that_cannot_be_loaded_is_not_called_missing(tmp_path: Path) -> None:
    """Stock functions know no buckets; what went wrong is raised, and counted."""

    def load(f: object) -> tuple[None, Transfer]:
        raise TransferError.wrap(OSError(errno.ECONNREFUSED, "refused"), "reading", str(f))

    counts = CallCounts(tmp_path)
    loading = Redirect(name="torch.load", stock=_stock, file=(0, "f"), counts=counts).loading(load)
    with pytest.raises(TransferError, match="refused"):
        loading("s3://bucket/model.pt")
    functions, _, _ = merged(tmp_path)
    assert functions["torch.load"].failed.calls == 1


@pytest.mark.parametrize(
    ("why", "raised", "text", "late"),
    [
        (Unsupported("because"), UsageError, "m.pt: because, and stock torch.save", False),
        (UnavailableError("s3", "no login."), UnavailableError, "no login", False),
        (UnavailableError("s3", "no login."), UnavailableError, "no login", True),
        (AttributeError("cannot pickle"), AttributeError, "cannot pickle", False),
    ],
)
def test_an_object_that_cannot_be_saved_is_not_stocks(
    why: Exception,
    raised: type[Exception],
    text: str,
    late: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nor is it said to be; what went wrong is raised, and counted."""

    def fail() -> Transfer:
        raise why

    def prepare(obj: object, f: object) -> Callable[[], Transfer]:
        if late:
            return fail
        raise why

    counts = CallCounts(tmp_path)
    saving = Redirect(name="torch.save", stock=_stock, file=(1, "f"), counts=counts).saving(prepare)
    with pytest.raises(raised, match=text):
        saving({}, "s3://bucket/m.pt")
    functions, _, _ = merged(tmp_path)
    assert functions["torch.save"].failed.calls == 1
    assert capsys.readouterr().err == ""


def test_what_is_done_while_the_command_runs(tmp_path: Path) -> None:
    """At once: a command that takes long is not waited for before."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def open_pipe() -> None:
        pipe.write_bytes(b"")  # `cat` waits for it

    assert launch(["cat", str(pipe)], BufferedWriter(), open_pipe).returncode == 0


def test_an_end_that_another_thread_was_told_of_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command ends after it was asked for and before the wait; a thread has taken SIGCHLD."""
    waitpid = os.waitpid
    asked = []

    def ends_just_now(pid: int, options: int) -> tuple[int, int]:
        asked.append(pid)
        if len(asked) > 1:
            return waitpid(pid, options)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        while signal.SIGCHLD in signal.sigpending():
            time.sleep(0.001)
        return 0, 0

    left = threading.Event()
    thread = threading.Thread(target=left.wait)  # blocks no signal
    thread.start()
    try:
        monkeypatch.setattr(os, "waitpid", ends_just_now)
        assert launch(["true"], BufferedWriter()).returncode == 0
    finally:
        left.set()
        thread.join()
    assert len(asked) > 1


@pytest.mark.parametrize("fails", [False, True])
def test_a_writer_that_does_not_work_here_is_reported(
    fails: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On stderr, in one line; whatever a writer raises, the script's end is waited for."""

    def available(self: BufferedWriter, target: object) -> Availability:
        if fails:
            raise ZeroDivisionError("1\n2")
        return Availability(ok=False, reason="no room.")

    monkeypatch.setattr(BufferedWriter, "available", available)
    _try_here(BufferedWriter())
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert "writer buffered does not work in this directory: " in captured.err
    assert ("ZeroDivisionError" if fails else "no room.") in captured.err


def test_a_module_that_changes_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its names are looked through as they were."""

    def stock() -> None: ...
    def ours() -> None: ...

    monkeypatch.setattr(replacing, "sys", SimpleNamespace(modules={}))

    def check() -> tuple[Callable[[], object], Callable[[], object]]:
        module = ModuleType("module")
        for number in range(50):
            setattr(module, f"name_{number}", stock)

        def replaced() -> None:
            assert len(replacing.replace(stock, ours, module)) == 50

        return replaced, lambda: setattr(module, "new", 1)

    at_every_collection(check)


def test_the_page_shows_the_summary() -> None:
    """Line by line."""
    page = Path(__file__).parents[3] / "docs" / "exec.md"
    torch_save = Function(
        redirected=Count(calls=18, bytes=1_667_236, seconds=0.315),
        stock={"not a path but a file object": Count(calls=1, seconds=0.0)},
    )
    save_file = Function(redirected=Count(calls=4, bytes=404_132, seconds=0.147))
    outcome = ExecOutcome(
        returncode=0,
        elapsed_s=1.0,
        functions={"safetensors.torch.save_file": save_file, "torch.save": torch_save},
        problems=(),
        processes=1,
    )
    shown = re.findall(r"^    iobench exec: (.*)$", page.read_text(), re.MULTILINE)
    assert [*summary(outcome, make("hybrid"))] == shown
