"""The stock functions that `iobench exec` replaces, by module, and what makes their calls.

The first call imports the modules that do the work, so that importing torch takes no longer.
"""

from __future__ import annotations

import functools
import io
import os
import time
from abc import ABCMeta
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any, Literal

from iobench.errors import UnavailableError
from iobench.integrations.default_writer import chosen_writer
from iobench.integrations.redirect.call_counts import CallCounts, Count
from iobench.integrations.replacing import bypass, bypass_reason, bypassed, replace
from iobench.integrations.stock_path import StockCall, StockPath, Unsupported, path_of
from iobench.writers.stream import BlockStream
from iobench.writers.transfer import Transfer

_NESTED = "made while another call was under way, for example by a signal handler"


@dataclass(frozen=True, kw_only=True)
class Redirect:
    """Replacement of the function `stock`.

    `name` is the function's name in reports; `file` is its file argument: position and keyword.
    Calls that go to stock go there with unchanged arguments, before anything was written.
    """

    name: str
    stock: Callable[..., Any]
    file: tuple[int, str]
    counts: CallCounts
    _reported: set[str] = field(default_factory=set)

    def saving(self, prepare: Callable[..., Callable[[], Transfer]]) -> Callable[..., Any]:
        """Return the replacement of a function that saves; see `StockCall.save`."""
        return self._replaced(
            lambda call: call.save(functools.partial(prepare, *call.args, **call.kwargs))
        )

    def loading(self, load: Callable[..., tuple[Any, Transfer | None]]) -> Callable[..., Any]:
        """Return the replacement of a function that loads; see `StockCall.load`."""
        return self._replaced(
            lambda call: call.load(functools.partial(load, *call.args, **call.kwargs))
        )

    def _replaced(self, ours: Callable[[RedirectedCall], Any]) -> Callable[..., Any]:
        """Return the function that lets `ours` make all calls but those of iobench itself."""

        @functools.wraps(self.stock)
        def either(*args: Any, **kwargs: Any) -> Any:
            reason = bypass_reason()
            own = bypassed() and not reason
            if own or isinstance(self.file_of(args, kwargs), BlockStream):
                return self.stock(*args, **kwargs)
            call = RedirectedCall(self, args, kwargs)
            return call.by_stock("read", Unsupported(reason)) if reason else ours(call)

        return either

    def file_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the file argument of a call; None if the call has none."""
        position, name = self.file
        return args[position] if len(args) > position else kwargs.get(name)


class RedirectedCall(StockCall):
    """One call of a redirected function, with its arguments and its start time.

    The stock function saves after any error, except those of pickling and of the write. Each
    outcome is counted.
    """

    falls_back = (Exception,)
    unwritten = (UnavailableError,)
    nested = _NESTED

    def __init__(self, redirect: Redirect, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        file = redirect.file_of(args, kwargs)
        super().__init__(redirect.name, file, functools.partial(redirect.stock, *args, **kwargs))
        self._redirect, self.args, self.kwargs = redirect, args, kwargs
        self._began = time.perf_counter()
        self._path = os.fsdecode(file) if isinstance(file, (str, bytes, os.PathLike)) else ""

    def _count(self, size_bytes: int = 0) -> Count:
        """Return this call as a Count, with the seconds until now."""
        seconds = time.perf_counter() - self._began
        return Count(calls=1, bytes=size_bytes, seconds=seconds, example=self._path)

    def redirected(self, moved: Transfer | None) -> None:
        count = self._count(moved.bytes if moved else 0)
        fallbacks = fallbacks_of(moved) if moved else []
        self._redirect.counts.add(self.function, "redirected", count, fallbacks=fallbacks)

    def failed(self) -> None:
        self._redirect.counts.add(self.function, "failed", self._count())

    def report(self, why: Exception) -> None:
        """Print the error behind a fallback at once; each reason once."""
        reason = reason_of(why)
        if not isinstance(why, Unsupported) and reason not in self._redirect._reported:
            self._redirect._reported.add(reason)
            self._redirect.counts.say(
                f"{self.function}({self._path}) is done by the stock function: {why}"
            )

    def by_stock(self, doing: Literal["read", "write to"], why: Exception) -> Any:
        """Call the stock function, count the call with its reason, and return the result."""
        if doing == "write to":
            self.report(why)
        self._began = time.perf_counter()
        try:
            return self.stock()
        finally:
            self.was_stock(why)

    def was_stock(self, why: Exception) -> None:
        """Count the call of the stock function with its reason."""
        reason = reason_of(why)
        self._redirect.counts.add(self.function, "stock", self._count(), reason=reason)


def reason_of(why: Exception) -> str:
    """Return the reason without file names, so that the summary has few different ones."""
    if isinstance(why, Unsupported):
        return str(why)
    if isinstance(why, UnavailableError):
        return f"writer {why.name} does not work there"
    text = why.strerror if isinstance(why, OSError) else None
    return f"{type(why).__name__}: {text}" if text else type(why).__name__


def fallbacks_of(moved: Transfer) -> list[str]:
    return [f"{one.wanted} -> {one.used}: {one.reason}" for one in moved.fallbacks]


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

        noted: set[str] = set()  # the fallbacks of a file count once

        def on_read(moved: Transfer) -> None:
            count = Count(bytes=moved.bytes, seconds=moved.elapsed_s)
            new = {*fallbacks_of(moved)} - noted
            noted.update(new)
            counts.add(redirect.name, "redirected", count, fallbacks=[*new])

        def on_stock(why: Exception) -> None:
            count = Count(calls=1, example=file)
            counts.add(redirect.name, "stock", count, reason=reason_of(why))

        writer = chosen_writer()
        opened = ours.OpenFile(writer, *args, **kwargs, on_stock=on_stock, on_read=on_read)
        replaced.register(ours.OpenFile)
        return opened, None

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
        return import_module(ours).prepare_save(chosen_writer(), *args, **kwargs)

    def load(*args: Any, **kwargs: Any) -> Any:
        return import_module(ours).load_by(chosen_writer(), *args, **kwargs)

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
        if mode != "wb" or bypassed():
            with stock(self, path, mode) as stream:
                yield stream
            return
        call = RedirectedCall(redirect, (self, path, mode), {})
        opened: BlockStream | None = None
        try:
            with bypass():
                writer = chosen_writer()
                target = StockPath.of(path_of(path), writer, stock_renames=False)
                opened = writer.open(target.path)
        except Exception as why:  # noqa: BLE001 -- reported, and stock writes the file
            refused = why
            call.report(why)
        with bypass():  # DCP calls torch.save with this stream
            if opened is None:
                try:
                    with stock(self, path, mode) as stream:
                        yield stream
                finally:
                    call.was_stock(refused)
                return
            try:
                with _DcpStream(opened, target.directory) as stream:
                    yield stream
            except BaseException:
                call.failed()
                raise
        call.redirected(opened.transfer)

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


class _DcpStream(io.RawIOBase):
    """A BlockStream with the file methods that DCP calls: flush after each tensor, fsync by fileno.

    Both have no effect: closing the stream makes the file durable and publishes it. `fileno` is the
    directory's descriptor, because without one DCP calls os.sync(), which syncs all file systems.
    """

    def __init__(self, stream: BlockStream, directory: str) -> None:
        super().__init__()
        self._stream, self._directory = stream, directory
        self._fd = -1

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        return self._stream.write(data)

    def tell(self) -> int:
        return self._stream.tell()

    def fileno(self) -> int:
        if self._fd < 0:
            self._fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return self._fd

    def close(self) -> None:
        if self.closed:
            return
        try:
            self._stream.close()
        finally:
            if self._fd >= 0:
                os.close(self._fd)
            super().close()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self._stream.abort()
        self.close()
