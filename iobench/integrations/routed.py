"""Temporary redirect of a framework's torch.save, torch.load and safetensors calls to a writer.

It applies to calls of one thread and to files below one directory. Integrations use it around a
save or a load; `iobench exec` instead redirects a whole process permanently.

staged_save: the same around a save of all ranks of Accelerate, which gets its name at the end.
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

from iobench.exports.staged_directory import StagedDirectory
from iobench.integrations import safetensors_dropins, torch_dropins
from iobench.integrations.replacing import Replaced, bypassed, put_back, replace
from iobench.writers.base import Writer


class _Route(threading.local):
    """This thread's writer, and the directory whose files it saves; no writer by default."""

    writer: Writer | None = None
    directory = ""


_route = _Route()
_lock = threading.Lock()
_inside = 0
_replaced: list[Replaced] = []


@contextmanager
def routed(writer: Writer, directory: str | os.PathLike[str]) -> Iterator[None]:
    """Let this thread save and load the files below `directory` by `writer` inside the block.

    Redirected are torch.save and load and safetensors' save_file and load_file, in all modules. The
    files are the stock ones and durable. Calls that a writer cannot make exactly like the stock
    function go to that function, and the logger `iobench` reports that.
    """
    before = _route.writer, _route.directory
    _install()
    _route.writer, _route.directory = writer, os.path.abspath(directory)
    try:
        yield
    finally:
        _route.writer, _route.directory = before
        _remove()


@contextmanager
def staged_save(
    accelerator: Any,
    writer: Writer,
    staged: StagedDirectory,
    *,
    publishes: bool,
    keep_others: bool = False,
) -> Iterator[None]:
    """Let all ranks of `accelerator` save below `staged.root` by `writer`, and publish that.

    All of them call this; one process of each file system `publishes`. DeepSpeed engines commit
    their background saves before that; otherwise they would before the next optimizer step. After
    an error, also of such a save, the old directory stays.
    """
    if publishes:
        staged.begin()
    accelerator.wait_for_everyone()
    try:
        with routed(writer, staged.root):
            yield
            for model in accelerator._models:
                decoupled = hasattr(model, "_commit_decoupled_checkpoint")
                if decoupled and model.checkpoint_engine.is_decoupled():
                    model._commit_decoupled_checkpoint()
    except BaseException:
        if publishes:
            staged.discard()
        raise
    accelerator.wait_for_everyone()
    if publishes:
        staged.publish(keep_others=keep_others)
    accelerator.wait_for_everyone()


def _redirected(
    stock: Callable[..., Any], ours: Callable[..., Any], position: int, name: str
) -> Any:
    """Return `stock`, replaced by `ours` for files of the route.

    The file is the positional argument `position` or the keyword argument `name`.
    """

    @functools.wraps(stock)
    def either(*args: Any, **kwargs: Any) -> Any:
        file = args[position] if len(args) > position else kwargs.get(name)
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
        for stock, ours, position, name in (
            (torch.save, torch_dropins.save, 1, "f"),
            (torch.load, torch_dropins.load, 0, "f"),
            (safetensors.torch.save_file, safetensors_dropins.save_file, 1, "filename"),
            (safetensors.torch.load_file, safetensors_dropins.load_file, 0, "filename"),
        ):
            _replaced.extend(replace(stock, _redirected(stock, ours, position, name)))


def _remove() -> None:
    global _inside
    with _lock:
        _inside -= 1
        if _inside:
            return
        put_back(_replaced)
        _replaced.clear()
