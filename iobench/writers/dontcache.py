"""RWF_DONTCACHE: whether an open file takes it."""

from __future__ import annotations

import errno
import os

from iobench import linux

__all__ = ["dontcache_refusal"]

_REFUSED = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}


def dontcache_refusal(fd: int) -> str | None:
    """Why the open file refuses RWF_DONTCACHE, found by reading a byte; None if it does not."""
    try:
        os.preadv(fd, [bytearray(1)], 0, linux.RWF_DONTCACHE)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        return f"RWF_DONTCACHE is refused ({error.strerror})"
    return None
