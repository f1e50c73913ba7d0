"""PinExtras: files with the values that the trainer added to pins."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

import xxhash

from iobench.errors import DataMismatchError, transfer_errors
from iobench.offload.record import Pin
from iobench.regular_file import read_regular
from iobench.writers.local.new_file import write_bytes

__all__ = ["PinExtras"]

_EXTRA = re.compile(r"extra-([0-9a-f]{16})")
"""Named after its XXH3, so that a new file never replaces one that a record refers to."""


class PinExtras:
    """The files `extra-XXH3` of a state directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write(self, extra: bytes) -> str:
        """Write `extra` and return its XXH3; durable on return. Raises TransferError."""
        digest = xxhash.xxh3_64_hexdigest(extra)
        path = self._path(digest)
        with transfer_errors("writing", path):
            write_bytes(path, extra)
        return digest

    def read(self, pin: Pin) -> bytes | None:
        """Return what was added to `pin`. Raises DataMismatchError if it is damaged or missing."""
        if pin.extra is None:
            return None
        path = self._path(pin.extra)
        try:
            data = read_regular(path)
        except FileNotFoundError:
            raise DataMismatchError(f"{path}: missing, it belongs to step {pin.step}") from None
        if xxhash.xxh3_64_hexdigest(data) != pin.extra:
            raise DataMismatchError(f"{path}: its bytes differ from the saved ones")
        return data

    def remove_others(self, pins: Collection[Pin]) -> None:
        """Remove the files of all pins but these."""
        kept = {pin.extra for pin in pins}
        for path in self._directory.iterdir():
            found = _EXTRA.fullmatch(path.name)
            if found and found[1] not in kept:
                path.unlink(missing_ok=True)

    def _path(self, digest: str) -> Path:
        return self._directory / f"extra-{digest}"
