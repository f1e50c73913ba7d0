"""torch's process-wide serialization settings, changed for the duration of a `with` block."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["crc32_setting"]

_lock = threading.RLock()
"""Held while the settings differ from the caller's."""


@contextmanager
def crc32_setting(enabled: bool) -> Iterator[None]:
    """Turn torch.save's CRC32 on or off inside the block. Other threads wait at the block."""
    with _lock:
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(enabled)
        try:
            yield
        finally:
            torch.serialization.set_crc32_options(before)
