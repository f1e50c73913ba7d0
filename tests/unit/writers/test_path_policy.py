"""FileSetting: the choice of a path in each situation."""

from __future__ import annotations

import pytest

from iobench.units import KIB, MIB
from iobench.writers.direct.file import FileSetting, IoPath

_SMALL = 256 * KIB
_BLOCK = 8 * MIB


_ALL = tuple(IoPath)


@pytest.mark.parametrize(
    ("paths", "size", "how", "path", "reason"),
    [
        (_ALL, _SMALL - 1, {}, "buffered", "small"),
        (_ALL, _SMALL, {}, "direct", "large"),
        (_ALL, _BLOCK, {"aligned": False}, "uncached", "unaligned"),
        (_ALL, _BLOCK, {"in_cache": True}, "buffered", "in the page cache"),
        (_ALL, 100, {"in_cache": True}, "buffered", "in the page cache"),
        (_ALL[:1], 100, {}, "direct", "small"),
        (("direct", "buffered"), _BLOCK, {}, "direct", "large"),
        (("direct", "buffered"), _BLOCK, {"aligned": False}, "buffered", "unaligned"),
        (("uncached", "buffered"), _BLOCK, {}, "uncached", "large"),
        (("buffered",), _BLOCK, {}, "buffered", "large"),
        (("uncached",), 100, {}, "uncached", "small"),
    ],
)
def test_situations(
    paths: tuple[str, ...], size: int, how: dict[str, bool], path: str, reason: str
) -> None:
    """Each situation has one path and one reason; without the path, the next best one."""
    setting = FileSetting(paths=tuple(map(IoPath, paths)), block_size=_BLOCK, small_size=_SMALL)
    assert setting.choose(size, **how) == (path, reason)


def test_read_soon() -> None:
    """Files that are read soon stay in the page cache."""
    setting = FileSetting(paths=_ALL, block_size=_BLOCK, small_size=_SMALL, read_soon=True)
    assert setting.choose(_BLOCK) == ("buffered", "read soon")
