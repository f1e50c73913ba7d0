"""Launch: runs a command with the redirect in all its Python processes, and returns the outcome.

`report` and `summary` show it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from iobench.errors import UsageError
from iobench.integrations.default_writer import CONFIG, EXEC
from iobench.integrations.redirect.call_counts import Count, Function, merged
from iobench.units import MIB, count_of, format_rate, format_size
from iobench.writers.base import Writer
from iobench.writers.config import dump_writer
from iobench.writers.local.new_file import write_text

SCHEMA = "iobench.exec/1"
_HOOK = Path(__file__).with_name("hook")
_FROM_TERMINAL = 128  # siginfo's SI_KERNEL
# Between waitpid and the wait for signals, another thread that does not block SIGCHLD gets it, and
# its default action is to forget it.
_LOST_AFTER_S = 0.5
_PASSED_ON = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1),
    *(signal.SIGUSR2, signal.SIGALRM, signal.SIGCONT, signal.SIGWINCH),
)
# Python ignores these signals, and a child process inherits that. The script starts with their
# default actions, as from a shell.
_OF_PYTHON = tuple(getattr(signal, name) for name in ("SIGPIPE", "SIGXFSZ"))


@dataclass(frozen=True, kw_only=True)
class ExecOutcome:
    """The command's return code (negative for a signal, as in subprocess) and the counted calls."""

    returncode: int
    elapsed_s: float
    functions: Mapping[str, Function]
    problems: Sequence[str]
    processes: int
    """Python processes that loaded a module with functions to redirect."""


def launch(
    command: Sequence[str], writer: Writer, on_started: Callable[[], None] = lambda: None
) -> ExecOutcome:
    """Run `command` to its end with its calls redirected to `writer`.

    Signals are passed on to the command. `on_started` is called once, when the command has been
    started; it must not raise. Raises UsageError if the command cannot be started.
    """
    with tempfile.TemporaryDirectory(
        prefix="iobench-exec-", ignore_cleanup_errors=True
    ) as directory:
        Path(directory, CONFIG).write_text(dump_writer(writer), encoding="utf-8")
        began = time.perf_counter()
        returncode = _run(command, _environment(directory), on_started)
        elapsed_s = time.perf_counter() - began
        functions, problems, processes = merged(directory)
    return ExecOutcome(
        returncode=returncode,
        elapsed_s=elapsed_s,
        functions=functions,
        problems=problems,
        processes=processes,
    )


def _environment(session: str) -> dict[str, str]:
    path = os.environ.get("PYTHONPATH", "")
    return {
        **os.environ,
        EXEC: session,
        "PYTHONPATH": os.pathsep.join([str(_HOOK), *([path] if path else [])]),
    }


def _run(
    command: Sequence[str], environment: Mapping[str, str], on_started: Callable[[], None]
) -> int:
    # Blocked signals stay pending until sigwaitinfo in `_wait` takes them: none is lost between the
    # start of the child and the wait, and none ends this process before the child ends.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [*_PASSED_ON, signal.SIGCHLD])
    try:
        try:
            child = os.posix_spawnp(
                command[0], list(command), environment, setsigmask=before, setsigdef=_OF_PYTHON
            )
        except OSError as error:
            raise UsageError(
                f"{command[0]}: cannot be run ({error.strerror}); "
                "give a command: iobench exec --config writer.toml -- python train.py"
            ) from error
        on_started()
        return _wait(child)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait(child: int) -> int:
    """Wait for `child`, passing on every signal that this process gets. Return its exit code.

    A terminal sends its signals to all processes of the foreground group, so the child already has
    those.
    """
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        info = signal.sigtimedwait([*_PASSED_ON, signal.SIGCHLD], _LOST_AFTER_S)
        if info and info.si_signo != signal.SIGCHLD and info.si_code != _FROM_TERMINAL:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, info.si_signo)


def report(outcome: ExecOutcome, command: Sequence[str], writer: Writer) -> dict[str, Any]:
    """Return the outcome as a JSON document; bytes and seconds are sums over all processes."""
    return {
        "schema": SCHEMA,
        "command": list(command),
        "returncode": outcome.returncode,
        "elapsed_s": outcome.elapsed_s,
        "writer": {"name": writer.name, "options": writer.options.to_dict()},
        "processes": outcome.processes,
        "functions": {name: asdict(entry) for name, entry in outcome.functions.items()},
        "problems": list(outcome.problems),
    }


def write_report(path: Path, document: Mapping[str, Any]) -> None:
    """Write the report completely or not at all. Raises OSError."""
    write_text(path, json.dumps(document, indent=1) + "\n")


_WORTH_A_RATE = 8 * MIB  # a rate of fewer bytes measures latency


def summary(outcome: ExecOutcome, writer: Writer) -> Iterator[str]:
    """Yield lines: calls of the writer, calls of stock with the reason, and failed calls."""
    options = ",".join(writer.options.changed())
    name = f"{writer.name},{options}" if options else writer.name
    if not outcome.functions:
        why = "no Python process with iobench loaded torch or safetensors"
        if outcome.processes:
            why = "the script saved and loaded nothing"
        yield f"nothing was redirected to {name}: {why}"
    else:
        processes = "1 process" if outcome.processes == 1 else f"{outcome.processes} processes"
        yield f"redirected to {name}, in {processes}:"
    width = max((len(function) for function in outcome.functions), default=0)
    for function, entry in outcome.functions.items():
        if entry.redirected.calls:
            yield f"  {function:{width}}  {_moved(entry.redirected)}"
        for text, times in entry.fallbacks.items():
            yield f"  {function:{width}}  {count_of(times, 'call')} fell back: {text}"
        for reason, count in entry.stock.items():
            example = f" ({count.example})" if count.example else ""
            yield f"  {function:{width}}  {_plain(count)} by the stock function: {reason}{example}"
        if entry.failed.calls:
            yield f"  {function:{width}}  {_plain(entry.failed)} FAILED ({entry.failed.example})"
    yield from outcome.problems


def _moved(count: Count) -> str:
    moved = f"{_plain(count)}, {format_size(count.bytes)}"
    if count.bytes < _WORTH_A_RATE or not count.seconds:
        return moved
    return f"{moved}, {format_rate(count.bytes / count.seconds)}"


def _plain(count: Count) -> str:
    return f"{count_of(count.calls, 'call')}, {count.seconds:.3f} s"
