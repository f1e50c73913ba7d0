"""FailedRestarts: how often a job was restored from a step and did not get any further."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

from iobench.errors import transfer_errors
from iobench.text import parse_json
from iobench.writers.local.new_file import sync_directory

__all__ = ["FailedRestarts"]

_FILE = ".iobench-restarts.json"


class FailedRestarts:
    """Counts in a file beside the checkpoints; used by rank 0.

    The first load of a step counts it; further loads by the same Checkpointer are no restarts. The
    next commit, and a good end of the job, remove the file. So the count of a step is the number of
    restarts from it that failed. Object stores have no such file: there nothing is counted.
    """

    def __init__(self, location: str | Path) -> None:
        self._directory = location if isinstance(location, Path) else None
        self._own: set[int] = set()

    @property
    def _path(self) -> Path:
        assert self._directory is not None
        return self._directory / _FILE

    def counts(self) -> dict[int, int]:
        """Return the failed restarts by step, without this one.

        A file that cannot be read counts nothing.
        """
        return {step: count - (step in self._own) for step, count in self._read().items()}

    def _read(self) -> dict[int, int]:
        if self._directory is None:
            return {}
        try:
            found = parse_json(self._path.read_bytes())
            return {int(step): int(count) for step, count in found.items()}
        except (OSError, ValueError, AttributeError, TypeError):
            return {}

    def loaded(self, step: int) -> None:
        """Count the first load of `step` by this Checkpointer. Raises TransferError."""
        if self._directory is None or step in self._own:
            return
        counts = self._read()
        counts[step] = counts.get(step, 0) + 1
        aside = self._path.with_name(f"{_FILE}.part")
        with transfer_errors("writing", self._path):
            aside.write_text(json.dumps(counts), "utf-8")
            aside.replace(self._path)
            sync_directory(self._directory)
        self._own.add(step)

    def progressed(self) -> None:
        """Forget all counts: the job has saved something newer, or has ended well.

        A file that cannot be removed gives a RuntimeWarning: the save itself is committed.
        """
        self._own.clear()
        if self._directory is None:
            return
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            warnings.warn(
                f"{self._path} cannot be removed ({error.strerror}): the next restart may count as "
                "a failed one",
                RuntimeWarning,
                stacklevel=2,
            )
