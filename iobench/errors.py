"""Every error that iobench raises on purpose, and the exit code each one gets.

IobenchError                      1  failed
|-- UsageError (ValueError)       2  what was asked for cannot be meant
|   |-- UnknownNameError             no writer, workload or option of that name
|   |-- OptionError                  a value out of its range, or not of its type
|   |-- WorkloadFileError            a workload file that does not say what it must
|   |-- TargetError (OSError)        the target is missing, not writable or too small
|   |-- StateError                   a training state that cannot be saved, or does not fit
|   `-- StateMismatchError           a checkpoint of another model
|-- UnavailableError              3  the writer cannot work here; says why and what to do
|-- DataMismatchError             4  bytes differ from what was saved
|-- RegressionError               5  a comparison found something slower than before
|-- ResultFileError (ValueError)  1  not a result file, or one that is damaged
|-- CeilingError                  1  fio failed to measure the ceiling
|-- ContenderError                1  a contender failed; the others were measured
|-- JobError                      1  one of several processes that save at once failed or ended
`-- TransferError (OSError)       1  a write, read, sync or commit failed; nothing was published
    `-- SaveError (RuntimeError)     of a drop-in for torch.save, which raises RuntimeErrors
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

__all__ = [
    "CeilingError",
    "ContenderError",
    "DataMismatchError",
    "IobenchError",
    "JobError",
    "OptionError",
    "RegressionError",
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
]


class IobenchError(Exception):
    """Base of every error that iobench raises on purpose."""

    exit_code = 1


class UsageError(IobenchError, ValueError):
    """What was asked for cannot be meant."""

    exit_code = 2


class UnknownNameError(UsageError):
    """No such writer, workload or option. Lists the known names and suggests the nearest."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind, self.name, self.known = kind, name, sorted(known)
        near = difflib.get_close_matches(name, self.known, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        super().__init__(f"unknown {kind} {name!r}{hint} Known: {', '.join(self.known) or 'none'}.")


class OptionError(UsageError):
    """A value out of its range, or not of its type."""


class WorkloadFileError(UsageError):
    """A workload file that does not say what it must: names the file, the field and the value."""


class TargetError(UsageError, OSError):
    """The target is missing, not a directory, not writable or too small; found before writing."""


class StateError(UsageError):
    """A training state that cannot be saved (names the object's path), or does not fit."""


class StateMismatchError(UsageError):
    """A checkpoint of another model; lists the tensors that differ.

    `missing` are names that were expected and are not in the checkpoint, `unexpected` those that
    are there and were not expected, `misshaped` maps names to (expected, found).
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


def _some(names: Sequence[str], most: int = 20) -> str:
    """`2 (a, b)`; of many names the first ones."""
    shown = ", ".join(names[:most])
    return f"{len(names)} ({shown}{', ...' if len(names) > most else ''})"


class UnavailableError(IobenchError):
    """The writer cannot work here; no writer can, where `name` is empty.

    `reason` says why, `remedy` what to do.
    """

    exit_code = 3

    def __init__(self, name: str, reason: str, remedy: str = "") -> None:
        self.name, self.reason, self.remedy = name, reason, remedy
        who = f"{name} is not" if name else "no writer is"
        super().__init__(f"{who} available here: {reason}" + (f" {remedy}" if remedy else ""))


class DataMismatchError(IobenchError):
    """Bytes differ from what was saved, or a file has another size than its image."""

    exit_code = 4


class RegressionError(IobenchError):
    """Something is slower than before, beyond noise and beyond the threshold that was set."""

    exit_code = 5


class ResultFileError(IobenchError, ValueError):
    """Not a result file of iobench, or one that is damaged."""


class CeilingError(IobenchError):
    """fio failed to measure the ceiling."""


class ContenderError(IobenchError):
    """A contender of a run failed and was left out; the record has the others' figures."""


class JobError(IobenchError):
    """One of several processes that save or restore at once failed; all of them were ended."""


class TransferError(IobenchError, OSError):
    """A write, read, sync or commit failed. Nothing was published under the final name."""

    @classmethod
    def wrap(cls, error: OSError, doing: str, path: object) -> TransferError:
        """`error` again, saying what was being done to which file; keeps errno."""
        wrapped = cls(error.errno, f"{doing}: {error.strerror or error}", str(path))
        wrapped.__cause__ = error
        return wrapped


class SaveError(TransferError, RuntimeError):
    """A drop-in for torch.save failed while writing: for whoever expects torch's RuntimeError."""

    @classmethod
    def of(cls, error: TransferError) -> Self:
        """`error` as this class, with its errno and file name."""
        if error.filename is None:
            return cls(*error.args)
        return cls(error.errno, error.strerror, error.filename)
