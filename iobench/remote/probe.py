"""Probes: a small write to the local tier, which measures it."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path

from iobench.checkpoint.pacing import PacedImage
from iobench.errors import transfer_errors
from iobench.units import MIB
from iobench.writers.base import Writer
from iobench.writers.image import Bytes, FileImage
from iobench.writers.local.new_file import PART_SUFFIX

__all__ = ["probe_bytes", "write_probe"]

_PROBE_PART, _LEAST_PROBE, _LARGEST_PROBE = 64, 4 * MIB, 64 * MIB
"""A smaller probe would measure the fixed time of a write."""


def probe_bytes(size_bytes: int) -> int:
    """Return the bytes of a probe: 1/64 of a checkpoint, 4 to 64 MiB, not more than there are."""
    return min(size_bytes, max(_LEAST_PROBE, min(size_bytes // _PROBE_PART, _LARGEST_PROBE)))


def write_probe(
    writer: Writer, directory: Path, memory: Bytes, rate_bytes_per_s: int | None = None
) -> None:
    """Write `memory` to a file in `directory`, durably; it is removed again.

    Raises TransferError and other errors of the writer.
    """
    name = f".probe.{secrets.token_hex(4)}{PART_SUFFIX}"
    path = directory / name
    try:
        image = FileImage.of(name, [memory])
        paced = PacedImage.over(image, rate_bytes_per_s) if rate_bytes_per_s else image
        writer.write(paced, directory, sync_directory=False)
    finally:
        with contextlib.suppress(FileNotFoundError), transfer_errors("removing", path):
            path.unlink()
