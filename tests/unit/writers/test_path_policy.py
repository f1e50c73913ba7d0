"""PathPolicy: the choice in each situation."""

from __future__ import annotations

import pytest

from iobench.units import KIB, MIB
from iobench.writers.direct.file import IoPath, PathPolicy

_SMALL = 256 * KIB
_BLOCK = 8 * MIB


@pytest.mark.parametrize(
    ("size", "how", "path", "reason"),
    [
        (_SMALL - 1, {}, "buffered", "small"),
        (_SMALL, {}, "direct", "large"),
        (_BLOCK, {"aligned": False}, "uncached", "unaligned"),
        (_BLOCK, {"in_cache": True}, "buffered", "in the page cache"),
        (100, {"in_cache": True}, "buffered", "in the page cache"),
    ],
)
def test_situations(size: int, how: dict[str, bool], path: str, reason: str) -> None:
    """If all paths are available, each situation has one path and one reason."""
    chosen = PathPolicy(small_size=_SMALL).choose(size, **how)
    assert chosen == (path, reason)


def test_read_soon() -> None:
    """Files that are read soon stay in the page cache."""
    chosen = PathPolicy(small_size=_SMALL, read_soon=True).choose(_BLOCK)
    assert chosen == ("buffered", "read soon")


@pytest.mark.parametrize(
    ("paths", "size", "aligned", "path"),
    [
        (("direct", "buffered"), _BLOCK, True, "direct"),
        (("direct", "buffered"), _BLOCK, False, "buffered"),
        (("uncached", "buffered"), _BLOCK, True, "uncached"),
        (("buffered",), _BLOCK, True, "buffered"),
        (("uncached",), 100, True, "uncached"),
        (("direct",), 100, True, "direct"),
    ],
)
def test_fewer_paths(paths: tuple[str, ...], size: int, aligned: bool, path: str) -> None:
    """If a path is missing, the next best allowed one is chosen."""
    policy = PathPolicy([IoPath(one) for one in paths], small_size=_SMALL)
    assert policy.choose(size, aligned=aligned)[0] == path


def test_dropped_paths() -> None:
    """A path that is dropped is not chosen again, and the last one cannot be dropped."""
    policy = PathPolicy(small_size=_SMALL)
    policy.drop(IoPath.DIRECT)
    assert policy.choose(_BLOCK) == ("uncached", "large")
    for dropped in (IoPath.UNCACHED, IoPath.BUFFERED):
        policy.drop(dropped)
        assert policy.choose(_BLOCK)[0] == IoPath.BUFFERED
