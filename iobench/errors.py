"""Every error that iobench raises on purpose, and its exit code.

    IobenchError                      1  base class
    |-- UsageError (ValueError)       2  the request is invalid
    |   |-- ResultFileError              a file is not a result file, is damaged, or exists already
    |   |-- UnknownNameError             no writer, workload or option has that name
    |   |-- OptionError                  a value is out of range or of the wrong type
    |   |-- WorkloadFileError            a workload file is incomplete or invalid
    |   |-- TargetError (OSError)        the target is missing, not writable or too small
    |   |-- StateError                   a training state cannot be saved, or does not fit
    |   `-- StateMismatchError           a checkpoint belongs to another model
    |-- UnavailableError              3  the writer cannot work here; reason and remedy
    |-- DataMismatchError             4  bytes differ from the saved ones
    |-- RegressionError               5  a comparison found a slowdown
    |-- FioError                      1  fio failed to measure
    |-- ContenderError                1  a contender failed; the others were measured
    |-- JobError                      1  one of several concurrent processes failed or ended
    |   `-- RankError                    the same for ranks of a job; names them
    |-- ReplicaError                  1  a copy in memory was not made, or cannot be read
    `-- TransferError (OSError)       1  a write, read, sync or commit failed
        `-- SaveError (RuntimeError)     the same in a drop-in for torch.save

Where a builtin fits, an error is that too: it is in brackets.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

__all__ = [
    "ContenderError",
    "DataMismatchError",
    "FioError",
    "IobenchError",
    "JobError",
    "OptionError",
    "RankError",
    "RegressionError",
    "ReplicaError",
    "ResultFileError",
    "SaveError",
    "StateError",
    "StateMismatchError",
    "TargetError",
    "TransferError",
    "UnavailableError",
    "UnknownNameError",
    "UsageError",
    "WorkloadFileError",
    "transfer_errors",
]

_MOST_NAMES = 20


class IobenchError(Exception):
    """Base of every error that iobench raises on purpose. All of them can be pickled and copied."""

    exit_code = 1

    def __reduce__(self) -> str | tuple[Any, ...]:
        # pickle calls the class with `args`, which is one text: not what __init__ takes everywhere.
        # DCP sends the errors of a rank and of a child process as pickles.
        if isinstance(self, OSError):
            return super().__reduce__()
        return _remade, (type(self), self.args), self.__dict__


def _remade(kind: type[IobenchError], args: tuple[Any, ...]) -> IobenchError:
    return kind.__new__(kind, *args)


class UsageError(IobenchError, ValueError):
    """The request is invalid."""

    exit_code = 2


class UnknownNameError(UsageError):
    """No writer, workload or option has this name. Suggests the nearest, and lists a few names."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind, self.name, self.known = kind, name, sorted(known)
        near = difflib.get_close_matches(name, self.known, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        if not near or len(self.known) <= _MOST_NAMES:
            hint += f" Known: {', '.join(self.known) or 'none'}."
        super().__init__(f"unknown {kind} {name!r}{hint}")


class OptionError(UsageError):
    """A value is out of range or of the wrong type."""


class WorkloadFileError(UsageError):
    """A workload file is incomplete or invalid: names the file, the field and the value."""


class TargetError(OSError, UsageError):  # in this order: ValueError's constructor drops the errno
    """The target is missing, not a directory, not writable or too small. Nothing was written."""


class ResultFileError(UsageError):
    """A file is missing, is not a result file of iobench, is damaged, or exists already."""


class StateError(UsageError):
    """A training state cannot be saved (names the object's path), or does not fit."""


class StateMismatchError(UsageError):
    """A checkpoint belongs to another model; lists the tensors that differ.

    `missing`: expected names that the checkpoint lacks. `unexpected`: names that only the
    checkpoint has. `misshaped`: maps names to (expected, found).
    """

    def __init__(
        self,
        where: str,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        misshaped: Mapping[str, tuple[str, str]] | None = None,
    ) -> None:
        self.missing, self.unexpected = tuple(missing), tuple(unexpected)
        self.misshaped = dict(misshaped or {})
        shapes = [
            f"{n}: {want} expected, {have} found" for n, (want, have) in self.misshaped.items()
        ]
        parts = [
            f"{kind} {_some(names)}"
            for kind, names in (
                ("missing", self.missing),
                ("unexpected", self.unexpected),
                ("mis-shaped", shapes),
            )
            if names
        ]
        super().__init__(f"{where} is of another model: {'; '.join(parts)}")


def _some(names: Sequence[str]) -> str:
    """Return `2 (a, b)`, with at most the first 20 names."""
    shown = ", ".join(names[:_MOST_NAMES])
    return f"{len(names)} ({shown}{', ...' if len(names) > _MOST_NAMES else ''})"


class UnavailableError(IobenchError):
    """The writer `name` cannot work here, or no writer if `name` is empty.

    `reason` says why, `remedy` what to do.
    """

    exit_code = 3

    def __init__(self, name: str, reason: str, remedy: str = "") -> None:
        self.name, self.reason, self.remedy = name, reason, remedy
        who = f"{name} is not" if name else "no writer is"
        super().__init__(f"{who} available here: {reason}" + (f" {remedy}" if remedy else ""))


class DataMismatchError(IobenchError):
    """Bytes differ from the saved ones, or a file has another size than its image."""

    exit_code = 4


class RegressionError(IobenchError):
    """A result is slower than before by more than the noise and the threshold."""

    exit_code = 5


class FioError(IobenchError):
    """A job of fio failed to measure."""


class ContenderError(IobenchError):
    """A contender failed and left the run; the record has the figures of the others."""


class JobError(IobenchError):
    """One of several concurrent processes failed."""


class RankError(JobError):
    """A rank of the job failed, ended, was silent or came too late. `ranks` lists such ranks.

    The exit code is that of the error by which the rank failed.
    """

    def __init__(
        self, message: str, *, ranks: Iterable[int] = (), exit_code: int = JobError.exit_code
    ) -> None:
        self.ranks, self.exit_code = tuple(ranks), exit_code
        super().__init__(message)


class ReplicaError(IobenchError):
    """A copy in a node's memory was not made, or cannot be read. Storage is not affected."""


class TransferError(IobenchError, OSError):
    """A write, read, sync or commit failed.

    On failure the name has what it had before. If only the sync of the directory failed, it has the
    whole new file, which a crash can still take back.
    """

    @classmethod
    def wrap(cls, error: OSError, doing: str, path: object) -> TransferError:
        """Return `error` as a TransferError that names the operation and the file; keeps errno."""
        wrapped = cls(error.errno, f"{doing}: {error.strerror or error}", str(path))
        wrapped.__cause__ = error
        return wrapped


class transfer_errors:  # noqa: N801 -- used as a function; a generator costs twice as much
    """Turns an OSError into a TransferError that names the file.

    Errors of iobench pass unchanged, but a DataMismatchError gets the name of the file.
    """

    __slots__ = ("_doing", "_path")

    def __init__(self, doing: str, path: object) -> None:
        self._doing, self._path = doing, path

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError) and not isinstance(error, IobenchError):
            raise TransferError.wrap(error, self._doing, self._path) from error
        if isinstance(error, DataMismatchError) and str(self._path) not in str(error):
            raise DataMismatchError(f"{self._path}: {error}") from error


class SaveError(TransferError, RuntimeError):
    """A drop-in for torch.save failed while writing; callers of torch.save catch RuntimeError."""

    @classmethod
    def of(cls, error: TransferError) -> Self:
        """Return `error` as this class, with its errno and file name."""
        if error.filename is None:
            return cls(*error.args)
        return cls(error.errno, error.strerror, error.filename)
