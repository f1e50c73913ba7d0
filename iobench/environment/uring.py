"""Probe of io_uring: a ring is set up and closed again."""

from __future__ import annotations

import ctypes
import errno
import os
from dataclasses import dataclass
from pathlib import Path

from iobench.environment.kernelfs import read_int

_SYS_IO_URING_SETUP = 425  # the same number on every architecture except alpha
_ENTRIES = 4
_PARAMS_BYTES = 120  # sizeof(struct io_uring_params), linux/io_uring.h
_FEATURES_OFFSET = 20
_SYSCTL = Path("/proc/sys/kernel/io_uring_disabled")


@dataclass(frozen=True, kw_only=True)
class IoUring:
    """Whether a ring `works`, the kernel's `features` bits, the sysctl, and why it does not."""

    works: bool = False
    disabled_sysctl: int | None = None
    features: int | None = None
    reason: str = ""
    remedy: str = ""


def explain_refusal(number: int, disabled: int | None) -> tuple[str, str]:
    """Return the reason and the remedy, from the errno and the sysctl io_uring_disabled.

    The sysctl (since Linux 6.6): 0 permits all processes, 1 only those with CAP_SYS_ADMIN or in
    io_uring_group, 2 no process.
    """
    if number == errno.ENOSYS:
        return (
            "the kernel has no io_uring (older than 5.1, built without it, or a sandbox)",
            "Use a kernel >= 5.10, or leave the sandbox; odirect and libaio work without it.",
        )
    if number == errno.EPERM and disabled:
        who = "for all processes" if disabled >= 2 else "for processes without CAP_SYS_ADMIN"
        return (
            f"disabled {who} by kernel.io_uring_disabled={disabled}",
            "As root: sysctl kernel.io_uring_disabled=0",
        )
    if number in (errno.EPERM, errno.EACCES):
        return (
            f"refused with {errno.errorcode[number]}, by a seccomp filter or security module",
            "Containers: allow io_uring in the seccomp profile "
            "(docker run --security-opt seccomp=FILE).",
        )
    if number == errno.ENOMEM:
        return ("not enough lockable memory for a ring", "Raise the limit: ulimit -l unlimited")
    return (f"{errno.errorcode.get(number, number)}: {os.strerror(number)}", "")


def describe_io_uring() -> IoUring:
    """Try to set up a ring."""
    disabled = read_int(_SYSCTL)
    libc = ctypes.CDLL(None, use_errno=True)
    params = ctypes.create_string_buffer(_PARAMS_BYTES)
    ring = libc.syscall(
        ctypes.c_long(_SYS_IO_URING_SETUP), ctypes.c_uint(_ENTRIES), ctypes.byref(params)
    )
    if ring < 0:
        reason, remedy = explain_refusal(ctypes.get_errno(), disabled)
        features = None
    else:
        os.close(ring)
        reason, remedy = "", ""
        features = int.from_bytes(params.raw[_FEATURES_OFFSET : _FEATURES_OFFSET + 4], "little")
    return IoUring(
        works=ring >= 0,
        disabled_sysctl=disabled,
        features=features,
        reason=reason,
        remedy=remedy,
    )
