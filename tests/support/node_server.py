"""Server that forks the processes of support.nodes: modules are imported once, for all of them.

Run as `python -m support.node_server LIMIT_S MODULE...`. It reads requests and writes answers as
lines of JSON. It has one thread, so that forked processes are safe. It kills its children when its
stdin is closed.
"""

import atexit
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import selectors
import signal
import sys
import threading
import traceback
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWPID = 0x20000000
_PR_SET_PDEATHSIG = 1


def _setns(path: str, kind: int = 0) -> None:
    """Enter the namespace of `path`; os.setns is new in Python 3.12."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _LIBC.setns(fd, kind):
            raise OSError(ctypes.get_errno(), "setns", path)
    finally:
        os.close(fd)


def enter(node: int, *kinds: str) -> None:
    """Enter these namespaces (`net`, `uts`, ...) of the process `node`."""
    for kind in kinds:
        _setns(f"/proc/{node}/ns/{kind}")


class _Child(Exception):  # noqa: N818 -- it is not an error
    """Raised in a forked process, to leave the loop of the server."""


def _start(request: dict[str, Any]) -> int:
    """Fork a process into the node of `request`; raise _Child in it."""
    sys.stdout.flush()
    pid = -1
    _setns(f"/proc/{request['node']}/ns/pid", _CLONE_NEWPID)  # of the children
    try:
        pid = os.fork()
    finally:
        if pid:
            _setns("/proc/self/ns/pid", _CLONE_NEWPID)
    if pid:
        return pid
    raise _Child


def _enter(request: dict[str, Any], limit_s: float) -> None:
    """Make this forked process one of the node: namespaces, directory, output, environment."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    enter(request["node"], "net", "uts", "ipc", "mnt")
    os.chdir(request["cwd"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    for number, suffix in ((1, ".out"), (2, ".err")):
        fd = os.open(request["output"] + suffix, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(fd, number)
        os.close(fd)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(request["environ"])
    faulthandler.dump_traceback_later(limit_s, exit=True)


def _run(request: dict[str, Any]) -> None:
    """Call the function, or become the command, of `request`."""
    target = request["target"]
    if not isinstance(target, str):
        os.execvp(target[0], target)
    from support import kill_points

    for point in request["points"]:
        kill_points.arm(point)
    module, _, name = target.partition(":")
    getattr(importlib.import_module(module), name)(*request["arguments"])


def _exit_code(request: dict[str, Any]) -> int:
    """Run the process and return its exit code, as the interpreter computes it."""
    try:
        _run(request)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(bool(ended.code))
    except BaseException:  # noqa: BLE001 -- a forked process never returns into the server
        traceback.print_exc()
        return 1
    return 0


def _end(code: int) -> None:
    """End like a forked process of multiprocessing: threads are joined and exit functions called.

    Destroying the modules of torch would take 0.7 s of CPU time.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing does
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class _Server:
    def __init__(self) -> None:
        self._children: set[int] = set()
        self._stdin = b""

    def serve(self) -> dict[str, Any] | None:
        """Answer requests until stdin is closed: None. In a forked process: its request."""
        wake, waked = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(waked, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        selector = selectors.DefaultSelector()
        selector.register(0, selectors.EVENT_READ)
        selector.register(wake, selectors.EVENT_READ)
        request = None
        try:
            while True:
                ready = {key.fd for key, _ in selector.select()}
                if wake in ready:
                    os.read(wake, 4096)
                self._reap()
                if 0 in ready:
                    data = os.read(0, 1 << 16)
                    if not data:
                        break
                    *lines, self._stdin = (self._stdin + data).split(b"\n")
                    for request in map(json.loads, lines):
                        self._answer(request)
        except _Child:
            selector.close()
            os.close(wake)
            os.close(waked)
            return request
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        return None

    def _answer(self, request: dict[str, Any]) -> None:
        try:
            if request["do"] == "start":
                pid = _start(request)
                self._children.add(pid)
                _say(pid=pid)
            else:
                if request["pid"] in self._children:  # else it is reaped, and the pid is free
                    os.kill(request["pid"], request["number"])
                _say(done=True)
        except OSError as error:
            _say(error=str(error))

    def _reap(self) -> None:
        for pid in list(self._children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._children.discard(pid)
                _say(ended=pid, code=os.waitstatus_to_exitcode(status))


def _say(**message: Any) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


def main() -> None:
    limit_s = float(sys.argv[1])
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a forked process would copy all pages
    request = _Server().serve()
    if request is not None:
        _enter(request, limit_s)
        _end(_exit_code(request))


if __name__ == "__main__":
    main()
