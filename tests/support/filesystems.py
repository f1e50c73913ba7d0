"""File systems that fail."""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

__all__ = ["shut_down"]


def shut_down(root: Path) -> None:
    """End the ext4 file system at once, as when its device disappears (EXT4_IOC_SHUTDOWN,
    ext4.h)."""
    fd = os.open(root, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, 0x8004587D, struct.pack("I", 2))
    finally:
        os.close(fd)
