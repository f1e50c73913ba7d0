"""Processes of Python programs that begin with torch and iobench imported, which takes seconds.

One process imports them. It forks a child for each program. The child is a process of its own like
one that was started: arguments, directory, environment, streams, signals and exit code.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

_MODULES = (
    *("torch", "numpy", "iobench.cli.main", "iobench.cli.progress", "iobench.cli.run"),
    "torch._dynamo",  # each torch optimizer imports it: 0.5 s of CPU time
    *("iobench.bench.planning", "iobench.bench.runner", "iobench.report.run"),
    *("iobench.tune.tuner", "iobench.train.session"),
    *(
        "torch.distributed.checkpoint",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "iobench.checkpoint.ranked.dcp_files",
    ),
    *("iobench.checkpoint.stored", "iobench.replicas.replicator", "iobench.integrations.dcp"),
    *("iobench.offload.optimizer", "iobench.offload.saves"),
    *("iobench.remote.local_tier", "iobench.remote.tiered_store"),
)
_BEGIN = "from support.preloaded import serve; serve()"
_LONGEST = 200_000  # bytes of a request: less than a socket's buffer
_PR_SET_CHILD_SUBREAPER, _CLONE_NEWPID = 36, 0x20000000
_NAMESPACES = ("net", "uts", "ipc", "mnt")  # beside that of PIDs, which only a child can be in
# A signal that arrives between `os.scandir()`, or importlib's open of a module, and its `with`
# leaves the object to the collector, which closes it and warns. In the tests' own process, which
# no signal interrupts, these warnings are errors.
_LEFT_BY_A_SIGNAL = ("unclosed scandir iterator", r"unclosed file <_io\.FileIO name='[^']*\.pyc'")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)

_servers: list[_Server] = []


class Preloaded(subprocess.Popen[str]):
    """A process of `python ARGUMENTS`, which are `-m MODULE ...`, `-c CODE ...` or `SCRIPT ...`.

    `-u` before them is honoured. Streams are those of subprocess.Popen. The process is a child of
    this one. `node`: it is in the namespaces of this process, such as the holder of a node.
    """

    def __init__(
        self,
        arguments: Sequence[object],
        *,
        cwd: object = None,
        env: Mapping[str, str] | None = None,
        node: int = 0,
        **streams: Any,
    ) -> None:
        self._node = node
        super().__init__(list(map(str, arguments)), cwd=cwd, env=env, text=True, **streams)

    def _execute_child(self, args: list[str], *rest: Any) -> None:
        """Called by subprocess.Popen once the pipes are made, in place of its fork and exec."""
        cwd, environment, pipes = rest[4], rest[5], rest[9:15]
        request = {
            "arguments": args,
            "cwd": os.path.abspath(cwd or os.curdir),
            "environment": dict(os.environ if environment is None else environment),
            "session": rest[20],
            "node": self._node,
        }
        if not _servers:
            _servers.append(_Server.started())
            atexit.register(_servers[0].close)
        ends = pipes[0], pipes[3], pipes[5]  # those of the child; -1 is what this process has
        streams = [number if end < 0 else end for number, end in enumerate(ends)]
        try:
            self.pid = _servers[0].start(request, streams)
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)


def run_preloaded(
    arguments: Sequence[object], *, timeout: float = 280, **how: Any
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS` to its end, which must come in `timeout` seconds."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Preloaded(arguments, **{**streams, **how}) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def run_killed(script: str, *arguments: object) -> None:
    """Run a script that must kill itself, like those of support.kill_points."""
    done = run_preloaded(["-c", script, *arguments], timeout=120)
    assert done.returncode == -signal.SIGKILL, (arguments, done.stderr)


class _Server:
    """The process that imports, and forks. It ends when its socket is closed."""

    def __init__(self, requests: socket.socket, pid: int) -> None:
        self._requests, self._pid = requests, pid

    @classmethod
    def started(cls) -> _Server:
        """Start the process."""
        ours, theirs = _sockets()
        path = os.pathsep.join(filter(None, sys.path))
        process = subprocess.Popen(
            [sys.executable, "-W", "error::ResourceWarning", "-c", _BEGIN, str(theirs.fileno())],
            env=os.environ | {"PYTHONPATH": path},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
        process.returncode = 0  # `close` waits for it
        theirs.close()
        return cls(ours, process.pid)

    @classmethod
    def forked(cls) -> _Server:
        """Fork this process, which has imported everything and has one thread."""
        ours, theirs = _sockets()
        pid = os.fork()
        if not pid:
            ours.close()
            _answer(theirs)
            os._exit(0)
        theirs.close()
        return cls(ours, pid)

    def start(self, request: Mapping[str, object], streams: Sequence[int]) -> int:
        """Return the PID of a new child of this process."""
        message = json.dumps(request).encode()
        assert len(message) < _LONGEST
        # The forked process loses its parent at once, and becomes a child of the next subreaper.
        _adopt_orphans(True)
        try:
            socket.send_fds(self._requests, [message], list(streams))
            return int(self._requests.recv(100))
        finally:
            _adopt_orphans(False)

    def close(self) -> None:
        """End the process; programs that still run go on."""
        self._requests.close()
        os.waitpid(self._pid, 0)


def fork_server() -> None:
    """Let a preloaded process start others without imports: it forks the server for them now."""
    _servers[:] = [_Server.forked()]
    atexit.register(_servers[0].close)


def enter(node: int, kind: str, flags: int = 0) -> None:
    """Enter a namespace (`net`, `uts`, ...) of the process `node`; os.setns is new in 3.12."""
    fd = os.open(f"/proc/{node}/ns/{kind}", os.O_RDONLY)
    try:
        done = ctypes.CDLL(None, use_errno=True).setns(fd, flags)
        assert done == 0, os.strerror(ctypes.get_errno())
    finally:
        os.close(fd)


def _sockets() -> tuple[socket.socket, socket.socket]:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _LONGEST)
    return ends


def _adopt_orphans(wanted: bool) -> None:
    done = ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0)
    assert done == 0, os.strerror(ctypes.get_errno())


def serve() -> None:
    """Import, and answer requests."""
    for message in _LEFT_BY_A_SIGNAL:
        warnings.filterwarnings("ignore", message, ResourceWarning)
    for name in _MODULES:
        importlib.import_module(name)
    _build_the_command_line()
    gc.collect()
    gc.freeze()
    _answer(socket.socket(fileno=int(sys.argv[1])))


def _answer(requests: socket.socket) -> None:
    """Fork for each request until the socket is closed. A child ends with its program."""
    while True:
        content, streams, _, _ = socket.recv_fds(requests, _LONGEST, 3)
        if not content:  # the process that asks has ended
            requests.close()
            return
        reading, writing = os.pipe()
        request = json.loads(content)
        middle = os.fork()
        if not middle:
            if request["node"]:
                enter(request["node"], "pid", _CLONE_NEWPID)  # of the child
            child = os.fork()
            if child:
                os.write(writing, str(child).encode())
                os._exit(0)
            requests.close()
            os.close(reading)
            os.close(writing)
            try:
                _become(**request, streams=streams)
                code: object = 0
            except SystemExit as ended:
                code = ended.code
            if isinstance(code, int | None):
                _end(code or 0)
            sys.exit(code)
        for end in (writing, *streams):
            os.close(end)
        os.waitpid(middle, 0)  # its child has lost its parent now
        requests.send(os.read(reading, 100))
        os.close(reading)


def _build_the_command_line() -> None:
    """Build each verb of iobench once, which takes each program several milliseconds otherwise."""
    parser: Any = sys.modules["typer.main"]
    command_line: Any = sys.modules["iobench.cli.main"]
    parser.get_command = functools.cache(parser.get_command)
    command_line.app_of = functools.cache(command_line.app_of)
    for verb in (None, *parser.get_command(command_line.app_of(None)).commands):
        parser.get_command(command_line.app_of(verb))


def _become(
    arguments: list[str],
    cwd: str,
    environment: dict[str, str],
    session: bool,
    node: int,
    streams: Sequence[int],
) -> None:
    """Run a program as `python ARGUMENTS` would."""
    for kind in _NAMESPACES if node else ():
        enter(node, kind)
    if session:
        os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    added = environment.get("PYTHONPATH", "").split(os.pathsep)  # a package of the test
    sys.path[:0] = [path for path in added if path and path not in sys.path]
    if "OMP_NUM_THREADS" in environment:  # which torch has read already
        sys.modules["torch"].set_num_threads(int(environment["OMP_NUM_THREADS"]))
    tempfile.tempdir = None
    sys.stdin = sys.__stdin__ = _stream(0, "r")
    sys.stdout = sys.__stdout__ = _stream(1, "w")
    sys.stderr = sys.__stderr__ = _stream(2, "w")
    sys.stderr.reconfigure(line_buffering=True, errors="backslashreplace")
    if arguments[0] == "-u":
        sys.stdout.reconfigure(write_through=True)
        arguments = arguments[1:]
    kind, *rest = arguments
    if kind not in ("-m", "-c"):
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(kind))
        runpy.run_path(kind, run_name="__main__")
        return
    what, *rest = rest
    sys.argv = [kind, *rest]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), vars(module))


def _end(code: int) -> None:
    """End like the interpreter, except that modules are not destroyed: with torch that takes 0.28 s
    of CPU time. Returns where the interpreter would report an error."""
    threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing does
    atexit._run_exitfuncs()
    vars(sys.modules["__main__"]).clear()
    gc.collect()  # what a program has left open warns
    try:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except (OSError, ValueError, AttributeError):
        return
    os._exit(code & 0xFF)


def _stream(number: int, mode: str) -> Any:
    return open(number, mode, buffering=1 if os.isatty(number) else -1, closefd=False)
