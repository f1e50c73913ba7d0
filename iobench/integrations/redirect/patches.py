"""The stock functions that `iobench exec` replaces, by module.

The first call imports the modules that do the work, so that importing torch takes no longer.
"""

from __future__ import annotations

import functools
import os
from abc import ABCMeta
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

from iobench.integrations.default_writer import redirected_writer
from iobench.integrations.redirect.call_counts import CallCounts, Count
from iobench.integrations.redirect.redirect import Redirect, fallbacks_of, reason_of
from iobench.integrations.replacing import bypass, bypassed, replace
from iobench.writers.transfer import Meter, Transfer


def torch(module: ModuleType, counts: CallCounts) -> None:
    """Replace torch.save and torch.load in torch.serialization, before torch imports them."""
    _replace(module, counts, "torch", ("save", "load"), "f")


def safetensors(module: ModuleType, counts: CallCounts) -> None:
    """Replace safetensors.torch.save_file and load_file.

    The stock load_file opens files by the stock class. Others import safe_open from this module,
    like vLLM: theirs is the replaced one.
    """
    stock = module.load_file

    @functools.wraps(stock)
    def load_file(*args: Any, **kwargs: Any) -> Any:
        with bypass():
            return stock(*args, **kwargs)

    replace(stock, load_file, module)
    _replace(module, counts, "safetensors.torch", ("save_file", "load_file"), "filename")


def safetensors_open(module: ModuleType, counts: CallCounts) -> None:
    """Replace the class safetensors.safe_open, before others import it from there."""
    stock = module.safe_open
    redirect = Redirect(
        name="safetensors.safe_open", stock=stock, file=(0, "filename"), counts=counts
    )

    def open_(*args: Any, **kwargs: Any) -> Any:
        from iobench.integrations import safetensors_open as ours

        file = os.fsdecode(redirect.file_of(args, kwargs) or "")

        def on_read(moved: list[Transfer]) -> None:
            read, seconds = sum(one.bytes for one in moved), sum(one.elapsed_s for one in moved)
            fallbacks = {text: None for one in moved for text in fallbacks_of(one)}
            counts.redirected(redirect.name, Count(bytes=read, seconds=seconds), fallbacks)

        def on_stock(why: Exception) -> None:
            counts.stock(redirect.name, reason_of(why), Count(calls=1, example=file))

        writer = redirected_writer()
        opened = ours.OpenFile(writer, *args, **kwargs, on_stock=on_stock, on_read=on_read)
        replaced.register(ours.OpenFile)
        return opened, Meter().transfer(writer.name, "read", 0, durable=True)

    opening = redirect.loading(open_)

    def new(_: type, *args: Any, **kwargs: Any) -> Any:
        return opening(*args, **kwargs)

    # A class, because annotations and isinstance may name it.
    names = {"__module__": module.__name__, "__doc__": stock.__doc__}
    replaced = ABCMeta("safe_open", (), {"__new__": new, "__wrapped__": stock, **names})
    replaced.register(stock)
    replace(stock, replaced, module)


def _replace(
    module: ModuleType, counts: CallCounts, package: str, names: tuple[str, str], file: str
) -> None:
    """Replace the function that saves and the one that loads; both have a parameter `file`."""
    ours = f"iobench.integrations.{package.partition('.')[0]}_dropins"

    def prepare(*args: Any, **kwargs: Any) -> Any:
        return import_module(ours).prepare_save(redirected_writer(), *args, **kwargs)

    def load(*args: Any, **kwargs: Any) -> Any:
        return import_module(ours).load_by(redirected_writer(), *args, **kwargs)

    saving, loading = (
        Redirect(
            name=f"{package}.{name}", stock=getattr(module, name), file=(at, file), counts=counts
        )
        for name, at in zip(names, (1, 0), strict=True)
    )
    replace(saving.stock, saving.saving(prepare), module)
    replace(loading.stock, loading.loading(load), module)


def dcp(module: ModuleType, counts: CallCounts) -> None:
    """Replace the methods by which DCP's FileSystemWriter and its subclasses create files."""
    stock = module.FileSystem.create_stream
    stock_mkdir = module.FileSystem.mkdir
    stock_rename = module.FileSystem.rename
    name = "torch.distributed.checkpoint.FileSystemWriter"
    redirect = Redirect(name=name, stock=stock, file=(1, "path"), counts=counts)

    @functools.wraps(stock)
    @contextmanager
    def create_stream(self: Any, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        from iobench.integrations.redirect.dcp_stream import dcp_stream

        with dcp_stream(redirect, self, path, mode, redirected_writer) as stream:
            yield stream

    @functools.wraps(stock_mkdir)
    def mkdir(self: Any, path: str | os.PathLike[str]) -> None:
        from iobench.writers.local.new_file import missing_directories, sync_directory

        made = [] if bypassed() else missing_directories(path)
        stock_mkdir(self, path)
        for directory in made:  # a crash may lose a new directory whose parent was not synced
            sync_directory(os.path.dirname(directory))

    @functools.wraps(stock_rename)
    def rename(self: Any, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        from iobench.writers.local.new_file import sync_directory

        stock_rename(self, path, new_path)
        if not bypassed():  # this rename commits the checkpoint; stock does not sync the directory
            sync_directory(os.path.dirname(new_path) or ".")

    module.FileSystem.create_stream = create_stream
    module.FileSystem.mkdir = mkdir
    module.FileSystem.rename = rename
