"""The tree of errors and their exit codes."""

from __future__ import annotations

import copy
import errno
import inspect
import pickle
import re
from collections.abc import Callable

import pytest

from iobench import errors
from iobench.errors import (
    DataMismatchError,
    IobenchError,
    StateMismatchError,
    TargetError,
    TransferError,
    UnavailableError,
    UnknownNameError,
    UsageError,
)

_EVERY = [
    kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, Exception)
]
_DRAWN = dict(re.findall(r"^(?:[ |`-]*)(\w+Error)\b.*?(?:\s([1-5])  .*)?$", errors.__doc__, re.M))


def test_every_error_is_exported_and_drawn() -> None:
    """`__all__` and the tree at the top of the file name every error, and no other. Where a builtin
    fits, the error is one of those too."""
    names = {kind.__name__ for kind in _EVERY if kind.__module__ == errors.__name__}
    assert set(errors.__all__) - {"transfer_errors"} == names == set(_DRAWN)
    assert issubclass(UsageError, ValueError)
    assert issubclass(TransferError, OSError)
    assert issubclass(TargetError, OSError)
    assert not issubclass(DataMismatchError, OSError)


@pytest.mark.parametrize("name", _DRAWN)
def test_exit_codes_are_as_drawn(name: str) -> None:
    """The exit code of an error is the one in the tree, or that of its base."""
    kind = getattr(errors, name)
    assert issubclass(kind, IobenchError)
    base, *_ = (one for one in (*kind.__mro__[1:], kind) if issubclass(one, IobenchError))
    assert kind.exit_code == int(_DRAWN[name] or base.exit_code)


def test_an_unknown_name_suggests_the_nearest() -> None:
    """The message lists what is known and names the nearest."""
    message = str(UnknownNameError("writer", "odirct", ["uring", "odirect"]))
    assert message == "unknown writer 'odirct'; did you mean 'odirect'? Known: odirect, uring."
    many = str(UnknownNameError("workload", "llama7c", ["llama7b", *"abcdefghijklmnopqrstuvwxyz"]))
    assert many == "unknown workload 'llama7c'; did you mean 'llama7b'?"
    assert "did you mean" not in str(UnknownNameError("writer", "zzz", ["odirect"]))
    assert str(UnknownNameError("writer", "zzz", [])) == "unknown writer 'zzz'. Known: none."


def _made(kind: type[IobenchError]) -> IobenchError:
    if kind is UnknownNameError:
        return kind("writer", "odirct", ["odirect"])
    if kind is UnavailableError:
        return kind("uring", "io_uring is disabled.", "Use odirect.")
    if kind is StateMismatchError:
        return kind("step-1", missing=["a"], misshaped={"b": ("[1]", "[2]")})
    return kind(errno.EIO, "failed", "f") if issubclass(kind, OSError) else kind("failed")


@pytest.mark.parametrize("name", sorted({*errors.__all__} - {"transfer_errors"}))
@pytest.mark.parametrize("remake", [lambda one: pickle.loads(pickle.dumps(one)), copy.copy])
def test_errors_of_other_processes(
    name: str, remake: Callable[[IobenchError], IobenchError]
) -> None:
    """Ranks and child processes send errors as pickles: type, text, attributes and notes stay."""
    error = _made(getattr(errors, name))
    error.add_note("a note")
    other = remake(error)
    assert type(other) is type(error)
    assert (str(other), other.args, vars(other)) == (str(error), error.args, vars(error))
    if isinstance(error, OSError):
        assert isinstance(other, OSError)
        assert (other.errno, other.filename) == (error.errno, error.filename)


def test_unavailable_says_why_and_what_to_do() -> None:
    """Reason and remedy are in the message and in attributes. Without the name of a writer, the
    message says that no writer is available."""
    error = UnavailableError("uring", "io_uring is disabled.", "Use odirect.")
    assert str(error) == "uring is not available here: io_uring is disabled. Use odirect."
    told = (error.name, error.reason, error.remedy)
    assert told == ("uring", "io_uring is disabled.", "Use odirect.")
    none = str(UnavailableError("", "s3 needs a bucket; gds is not available here: no GPU."))
    assert none.startswith("no writer is available here: s3 needs a bucket; gds is not available")


def test_wrapped_errors_keep_errno_file_and_cause() -> None:
    """TransferError.wrap keeps errno, names the file and what was done, and chains the cause. The
    text of an OSError without errno is kept."""
    cause = OSError(errno.ENOSPC, "No space left on device")
    error = TransferError.wrap(cause, "writing", "/some/file")
    assert (error.errno, error.filename) == (errno.ENOSPC, "/some/file")
    assert "writing: No space left on device" in str(error)
    assert error.__cause__ is cause
    assert "odd" in str(TransferError.wrap(OSError("odd"), "reading", "f"))


def test_a_target_error_has_what_an_oserror_has() -> None:
    """As a ValueError first it would have no errno, no file, and a tuple for a text."""
    error = TargetError(errno.EEXIST, "cannot be made", "/some/file")
    assert (error.errno, error.filename) == (errno.EEXIST, "/some/file")
    assert str(error) == f"[Errno {errno.EEXIST}] cannot be made: '/some/file'"
    assert str(TargetError("/some/file: is a link")) == "/some/file: is a link"
