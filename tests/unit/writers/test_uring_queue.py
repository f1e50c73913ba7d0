"""PyuringRing: with a real kernel, and with a fake binding that fails in rare ways."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Sequence

import numpy as np
import pytest
from support.pyuring_wheels import WHEELS_OF_PYURING

from iobench.environment.machine import IoUring
from iobench.errors import UnavailableError
from iobench.testing import Footprint, content
from iobench.writers.direct import ring as module
from iobench.writers.direct.ring import PyuringRing


class _Ctx:
    """A fake UringCtx of pyuring: its submissions fail with `errors`, in order."""

    def __init__(self, errors: Sequence[int] = (), entries: int = 1, setup_flags: int = 0) -> None:
        self.errors, self.queued, self.taken = list(errors), [], []
        self.flags = setup_flags
        self.closed = False

    def write_async_ptr(self, *arguments: int) -> int:
        self.queued.append(arguments[-1])
        self.submit()
        return arguments[-1]

    read_async_ptr = write_async_ptr

    def submit(self) -> int:
        number = self.errors.pop(0) if self.errors else 0
        if number:
            raise OSError(number, os.strerror(number))
        count = len(self.queued)
        self.taken += self.queued
        self.queued.clear()
        return count

    def wait_completion(self) -> tuple[int, int]:
        assert self.taken, "waits for ever"
        return self.taken.pop(0), 4096

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch):
    """Make a ring with a `_Ctx` that has these errors; pauses take no time."""
    monkeypatch.setattr(module.time, "sleep", lambda _: None)

    def made(*errors: int) -> tuple[PyuringRing, _Ctx]:
        ctx = _Ctx(list(errors))
        monkeypatch.setattr(module, "_set_up", lambda *_: ctx)
        return PyuringRing(8), ctx

    return made


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EBUSY, errno.EINTR])
@pytest.mark.parametrize("times", [1, 2, 7])
def test_operations_that_were_not_taken_are_resubmitted(make, number: int, times: int) -> None:
    """A submission with a transient error is neither lost nor made twice."""
    ring, ctx = make(0, *[number] * times)
    ring.write(3, 4096, 4096, 0, 1)
    ring.write(3, 8192, 4096, 4096, 2)
    ring.read(3, 8192, 4096, 4096, 3)
    assert sorted(ring.wait()[0] for _ in range(3)) == [1, 2, 3]
    assert not ctx.queued
    assert not ctx.taken


def test_a_kernel_that_takes_nothing(make) -> None:
    """A submission ends with EAGAIN when nothing is taken for long, and is never repeated."""
    ring, ctx = make(*[errno.EAGAIN] * 10_000)
    with pytest.raises(OSError, match="takes no io_uring") as caught:
        ring.write(3, 4096, 4096, 0, 1)
    assert caught.value.errno == errno.EAGAIN
    left = len(ctx.errors)
    with pytest.raises(OSError, match="io_uring has failed"):
        ring.read(3, 8192, 4096, 4096, 2)
    assert (len(ctx.errors), ctx.queued) == (left, [1])


@pytest.mark.parametrize("transient", [(), (errno.EAGAIN,)])
@pytest.mark.parametrize("number", [errno.EBADF, errno.ENXIO])
def test_nothing_is_submitted_after_a_failure(make, number: int, transient) -> None:
    """A refused operation stays queued and must never be submitted; taken ones still complete."""
    ring, ctx = make(0, *transient, number)
    ring.write(3, 4096, 4096, 0, 1)
    with pytest.raises(OSError, match=os.strerror(number)):
        ring.write(3, 8192, 4096, 4096, 2)
    with pytest.raises(OSError, match="io_uring has failed") as caught:
        ring.write(3, 8192, 4096, 4096, 3)
    assert caught.value.errno == number
    assert ring.wait() == (1, 4096)
    assert ctx.queued == [2]


@pytest.mark.parametrize("refused", [False, True])
def test_setup_flags_are_tried(monkeypatch: pytest.MonkeyPatch, refused: bool) -> None:
    """A kernel that does not know them gets none."""

    class Binding:
        @staticmethod
        def UringCtx(*, entries: int, setup_flags: int) -> _Ctx:  # noqa: N802, ARG004 -- pyuring's name
            if setup_flags and refused:
                raise OSError(errno.EINVAL, "Invalid argument")
            return _Ctx(setup_flags=setup_flags)

    monkeypatch.setattr(module, "_pyuring", lambda: Binding)
    assert module._set_up(4).flags == (0 if refused else module._FLAGS)


def test_a_kernel_without_io_uring(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the reason of the kernel and the remedy."""

    class Binding:
        @staticmethod
        def UringCtx(**values: int) -> _Ctx:  # noqa: N802, ARG004 -- pyuring's name
            raise OSError(errno.EOPNOTSUPP, "uring_create_ex: Operation not supported")

    known = IoUring(reason="disabled for everybody", remedy="As root: sysctl")
    monkeypatch.setattr(module, "_pyuring", lambda: Binding)
    monkeypatch.setattr(module, "describe_io_uring", lambda: known)
    with pytest.raises(UnavailableError) as caught:
        PyuringRing(4)
    assert caught.value.reason == "io_uring is disabled for everybody."
    assert caught.value.remedy == "As root: sysctl"
    monkeypatch.setattr(module, "describe_io_uring", lambda: IoUring(works=True))
    with pytest.raises(UnavailableError, match="a ring of 4 operations"):
        PyuringRing(4)


def _require_io_uring() -> None:
    if not WHEELS_OF_PYURING:
        pytest.importorskip("pyuring", reason="pyuring has no wheel for this Python or processor")
    known = module.describe_io_uring()
    if not known.works:
        pytest.skip(f"io_uring is {known.reason}")


def test_a_real_ring(fd: int) -> None:
    """Writes and reads work; a hundred rings leave no descriptor, mapping or thread."""
    _require_io_uring()
    data, back = content(4096), np.zeros(4096, dtype=np.uint8)
    PyuringRing(64).close()
    maps = _ring_mappings()
    with Footprint.unchanged():
        for tag in range(100):
            ring = PyuringRing(64)
            ring.write(fd, data.ctypes.data, 4096, 4096 * tag, tag)
            assert ring.wait() == (tag, 4096)
            ring.read(fd, back.ctypes.data, 4096, 4096 * tag, tag)
            assert ring.wait() == (tag, 4096)
            ring.close()
    assert np.array_equal(back, data)
    assert _ring_mappings() == maps


def test_a_read_that_was_refused_is_never_made(fd: int) -> None:
    """A real kernel refuses a submission of another thread; the operation stays queued."""
    _require_io_uring()
    os.pwrite(fd, content(8192), 0)
    given_back, back = np.zeros(4096, dtype=np.uint8), np.zeros(4096, dtype=np.uint8)
    refused: list[int | None] = []
    ring = PyuringRing(8)
    ring._ring._owner_thread_id = None  # else pyuring itself refuses

    def read() -> None:
        try:
            ring.read(fd, given_back.ctypes.data, 4096, 0, 1)
        except OSError as error:
            refused.append(error.errno)

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    try:
        with pytest.raises(OSError, match="io_uring has failed"):
            ring.read(fd, back.ctypes.data, 4096, 4096, 2)
    finally:
        ring.close()
    assert refused == [errno.EEXIST]
    assert not given_back.any()


def _ring_mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum("io_uring" in line for line in maps)


def test_waiting_lets_other_threads_run() -> None:
    """A waiting ring releases the GIL, so that a trainer continues."""
    _require_io_uring()
    reading, writing = os.pipe()
    back = np.zeros(1, dtype=np.uint8)
    ring = PyuringRing(1)
    try:
        ring.read(reading, back.ctypes.data, 1, 0, 5)
        # Only another thread's Python code ends the wait.
        threading.Timer(0.01, os.write, (writing, b"x")).start()
        assert ring.wait() == (5, 1)
    finally:
        ring.close()
        os.close(reading)
        os.close(writing)


_FILTERED = """
import ctypes, errno, struct, sys
from iobench.writers.uring import UringWriter

writer = UringWriter()
# BPF: a = number of the system call; io_uring_setup (425) gets the errno, all else passes.
code = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050000 | int(sys.argv[1])),
        (0x06, 0, 0, 0x7FFF0000)]
program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
wanted = Program(len(code), ctypes.addressof(program))
if libc.prctl(22, 2, ctypes.byref(wanted), 0, 0):  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
    print("skip"); sys.exit()
answer = writer.available(sys.argv[2])
print(answer.ok, answer.reason, answer.remedy)
try:
    from iobench.writers.image import FileImage
    writer.write(FileImage.of("model", [b"x"]), sys.argv[2])
except Exception as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EPERM, ["refused with EPERM, by a seccomp filter", "seccomp profile"]),
        (errno.ENOSYS, ["the kernel has no io_uring"]),
        (errno.ENOMEM, ["not enough lockable memory", "ulimit -l unlimited"]),
    ],
)
def test_a_process_without_permission(tmp_path, number: int, words: list[str]) -> None:
    """Under a real seccomp filter `available` says no, why and what to do; nothing is left."""
    _require_io_uring()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _FILTERED, str(number), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    if done.stdout == "skip\n":
        pytest.skip("no seccomp filters here")
    answer, raised = done.stdout.splitlines()
    assert answer.startswith("False")
    assert all(word in answer for word in words), answer
    assert raised == "UnavailableError"
    assert list(tmp_path.iterdir()) == []
