"""Routing a framework's own torch.save, torch.load and safetensors calls over a writer for a while.

Only calls of the thread inside, and only for files below one directory. `iobench exec` redirects a
whole process for good; this is for integrations that know when a checkpoint is saved.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import safetensors.torch
import torch

from iobench.integrations import safetensors_dropins, torch_dropins
from iobench.integrations.bypass import bypassed
from iobench.integrations.replacing import Replaced, put_back, replace
from iobench.writers.base import Writer

__all__ = ["routed"]


class _Route(threading.local):
    """Where this thread's files go over which writer; nowhere by default."""

    writer: Writer | None = None
    directory = ""


_route = _Route()
_lock = threading.Lock()
_inside = 0
_replaced: list[Replaced] = []


@contextmanager
def routed(writer: Writer, directory: str | os.PathLike[str]) -> Iterator[None]:
    """Inside, this thread saves and loads the files below `directory` by `writer`.

    torch.save and load, safetensors' save_file and load_file, wherever a module has taken them; the
    files are stock's and durable. What a writer cannot do as the stock function does, that does,
    and the logger `iobench` tells so.
    """
    before = _route.writer, _route.directory
    _install()
    _route.writer, _route.directory = writer, os.path.abspath(directory)
    try:
        yield
    finally:
        _route.writer, _route.directory = before
        _remove()


def _detour(stock: Callable[..., Any], ours: Callable[..., Any], place: int, name: str) -> Any:
    """`stock`, but for the route's files, which are argument `place` or `name`."""

    @functools.wraps(stock)
    def either(*args: Any, **kwargs: Any) -> Any:
        file = args[place] if len(args) > place else kwargs.get(name)
        if _route.writer is None or bypassed() or not _is_below(file, _route.directory):
            return stock(*args, **kwargs)
        return ours(*args, writer=_route.writer, **kwargs)

    return either


def _is_below(file: Any, directory: str) -> bool:
    if not isinstance(file, (str, os.PathLike)):
        return False
    path = os.path.abspath(os.fsdecode(file))
    return path.startswith(directory.rstrip("/") + "/")


def _install() -> None:
    global _inside
    with _lock:
        _inside += 1
        if _inside > 1:
            return
        stock = safetensors.torch
        for old, new in (
            (torch.save, _detour(torch.save, torch_dropins.save, 1, "f")),
            (torch.load, _detour(torch.load, torch_dropins.load, 0, "f")),
            (
                stock.save_file,
                _detour(stock.save_file, safetensors_dropins.save_file, 1, "filename"),
            ),
            (
                stock.load_file,
                _detour(stock.load_file, safetensors_dropins.load_file, 0, "filename"),
            ),
        ):
            _replaced.extend(replace(old, new))


def _remove() -> None:
    global _inside
    with _lock:
        _inside -= 1
        if _inside:
            return
        put_back(_replaced)
        _replaced.clear()
