"""Storage of the offload engine that fails, and what is missing where it runs: one error each."""

import errno
from collections.abc import Iterator

import pytest
import torch
from support.filesystems import after_power_cut, shut_down
from support.offload_training import (
    OPTIONS,
    VALUES,
    assert_equal,
    give_gradients,
    make_parameters,
    snapshot,
    stock_snapshots,
)
from support.preloaded import run_preloaded

from iobench.errors import TransferError
from iobench.offload import AdamW
from iobench.offload.files import ThreadRing
from iobench.units import MIB


@pytest.fixture(scope="module", autouse=True)
def _begun() -> Iterator[None]:
    """One thread of torch; and the process that forks others has begun."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    run_preloaded(["-c", "pass"])
    yield
    torch.set_num_threads(before)


def _step_and_wait(optimizer: AdamW, steps: range) -> None:
    for step in steps:
        give_gradients(optimizer.param_groups[0]["params"], step)
        optimizer.step()
        optimizer.wait()


@pytest.mark.root
def test_a_device_that_fails(new_filesystem, tmp_path) -> None:
    """EIO between two steps: TransferError with it, then for every call; what was durable is
    there when the device is back."""
    root = new_filesystem("ext4", 32 * MIB)
    parameters = make_parameters()
    optimizer = AdamW(parameters, root / "state", **VALUES, **OPTIONS)
    _step_and_wait(optimizer, range(3))
    shut_down(root)
    with pytest.raises(TransferError) as caught:
        _step_and_wait(optimizer, range(3, 9))
    assert caught.value.errno in (errno.EIO, errno.EROFS)
    with pytest.raises(TransferError, match=r"has failed: .*Input/output|continue with resume"):
        optimizer.pin(1)
    with pytest.raises(TransferError):
        optimizer.close()
    with (
        after_power_cut(root, tmp_path) as after,
        AdamW.resume(make_parameters(1), after / "state", verify=True) as again,
    ):
        assert again.updates >= 3
        assert_equal(snapshot(again), stock_snapshots(again.updates)[-1])


_FILTERED = """
import ctypes, errno, struct, sys, warnings
import torch
from support.offload_training import *
from iobench.offload import AdamW
torch.set_num_threads(1)
# BPF: a = number of the system call; io_uring_setup (425) gets EPERM, all else passes.
code = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050000 | errno.EPERM),
        (0x06, 0, 0, 0x7FFF0000)]
program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
wanted = Program(len(code), ctypes.addressof(program))
if libc.prctl(22, 2, ctypes.byref(wanted), 0, 0):  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
    print("skip"); sys.exit()
parameters = make_parameters()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    optimizer = AdamW(parameters, sys.argv[1], **VALUES, **OPTIONS)
print(len(caught), caught[0].category.__name__, caught[0].message)
with optimizer:
    for step in range(3):
        give_gradients(parameters, step)
        optimizer.step()
    assert_equal(snapshot(optimizer), stock_snapshots(3)[-1])
print("equal")
"""


def test_a_process_without_permission_for_io_uring(tmp_path) -> None:
    """Threads read and write in its place, with one warning that says why and what to do."""
    done = run_preloaded(["-c", _FILTERED, tmp_path])
    if done.stdout == "skip\n":
        pytest.skip("no seccomp filters here")
    assert done.returncode == 0, done.stderr
    told, result = done.stdout.splitlines()
    assert told.startswith("1 RuntimeWarning uring is not available here: io_uring is refused with")
    assert "allow io_uring in the seccomp profile" in told
    assert "8 threads read and write in each direction" in told
    assert result == "equal"
    with AdamW.resume(make_parameters(1), tmp_path, verify=True) as again:
        assert again.updates == 3


def test_errors_of_threads(tmp_path) -> None:
    """Their errno is the completion of the operation, as in an io_uring."""
    ring = ThreadRing(2)
    try:
        memory = bytearray(512)
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        ring.read(-1, address, 512, 0, 7)
        assert ring.wait() == (7, -errno.EBADF)
        with (tmp_path / "file").open("wb") as file:
            ring.write(file.fileno(), address, 512, 0, 8)
            assert ring.wait() == (8, 512)
    finally:
        ring.close()
