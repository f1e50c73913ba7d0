"""Redirect: one stock function's calls, over the writer where that is the same, else as before."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from iobench.errors import UnavailableError
from iobench.integrations.bypass import bypass, bypassed
from iobench.integrations.redirect.call_counts import CallCounts, Count
from iobench.integrations.stock_path import (
    NotPicklable,
    StockOnly,
    check_stock_can_load,
    check_stock_can_save,
)
from iobench.writers.stream import Stream
from iobench.writers.transfer import Transfer

__all__ = ["Redirect", "fallbacks_of"]


@dataclass(frozen=True, kw_only=True)
class Redirect:
    """Stands in for `stock`, which is called `name` and has its file as argument `file`.

    What goes to stock goes there with the very arguments, and before anything was written.
    """

    name: str
    stock: Callable[..., Any]
    file: tuple[int, str]
    """Its place and its name."""
    counts: CallCounts
    _told: set[str] = field(default_factory=set)

    def saving(self, prepare: Callable[..., Callable[[], Transfer]]) -> Callable[..., Any]:
        """`prepare` describes the file, raising where it cannot; what it returns writes it.

        That is not tried twice: what fails while it is written is raised, and so is what pickling
        raises. So is all that fails for an object in a bucket, which stock could not write.
        """

        @functools.wraps(self.stock)
        def save(*args: Any, **kwargs: Any) -> Any:
            if self._untouched(args, kwargs):
                return self.stock(*args, **kwargs)
            call = _Call(self, args, kwargs)
            refused: Exception | None = None
            try:
                with bypass():
                    write = prepare(*args, **kwargs)
            except NotPicklable as why:  # stock would raise it over a file that it has truncated
                self.counts.failed(self.name, call.count())
                raise why.error from None
            except Exception as why:  # noqa: BLE001 -- it is told, and stock has the last word
                refused = why
            if refused is None:
                try:
                    with bypass():
                        call.redirected(write())
                    return None
                except UnavailableError as why:
                    refused = why
                except Exception:
                    self.counts.failed(self.name, call.count())
                    raise
            call.check(check_stock_can_save, refused)
            call.tell(refused)
            return call.stock(refused)

        return save

    def loading(self, load: Callable[..., tuple[Any, Transfer]]) -> Callable[..., Any]:
        """Whatever goes wrong in `load`, stock may try, or raise what its callers know.

        Not of an object in a bucket: stock would call it missing, whatever went wrong.
        """

        @functools.wraps(self.stock)
        def loading(*args: Any, **kwargs: Any) -> Any:
            if self._untouched(args, kwargs):
                return self.stock(*args, **kwargs)
            call = _Call(self, args, kwargs)
            try:
                with bypass():
                    found, moved = load(*args, **kwargs)
            except Exception as why:  # noqa: BLE001 -- it is counted, and stock has the last word
                refused = why
            else:
                call.redirected(moved)
                return found
            call.check(check_stock_can_load, refused)
            return call.stock(refused)

        return loading

    def _untouched(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return bypassed() or isinstance(self.file_of(args, kwargs), Stream)

    def file_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The file of a call; None for a call that names none."""
        place, name = self.file
        return args[place] if len(args) > place else kwargs.get(name)


class _Call:
    """One call, and when it began."""

    def __init__(self, detour: Redirect, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._detour, self._args, self._kwargs = detour, args, kwargs
        self._began = time.perf_counter()
        self._given = file = detour.file_of(args, kwargs)
        self._file = os.fsdecode(file) if isinstance(file, (str, bytes, os.PathLike)) else ""

    def count(self, size_bytes: int = 0) -> Count:
        """The call as it stands now."""
        seconds = time.perf_counter() - self._began
        return Count(calls=1, bytes=size_bytes, seconds=seconds, example=self._file)

    def redirected(self, moved: Transfer) -> None:
        """It went over the writer."""
        detour = self._detour
        detour.counts.redirected(detour.name, self.count(moved.bytes), fallbacks_of(moved))

    def check(self, stock_can: Callable[[str, object, Exception], None], why: Exception) -> None:
        """Raise what `stock_can` raises, where stock cannot; it is a failure then."""
        try:
            stock_can(self._detour.name, self._given, why)
        except Exception:
            self._detour.counts.failed(self._detour.name, self.count())
            raise

    def tell(self, why: Exception) -> None:
        """Say at once that something failed; each reason once."""
        reason = _reason(why)
        if not isinstance(why, StockOnly) and reason not in self._detour._told:
            self._detour._told.add(reason)
            self._detour.counts.say(
                f"{self._detour.name}({self._file}) is done by the stock function: {why}"
            )

    def stock(self, why: Exception) -> Any:
        """What the stock function returns."""
        detour = self._detour
        self._began = time.perf_counter()
        try:
            return detour.stock(*self._args, **self._kwargs)
        finally:
            detour.counts.stock(detour.name, _reason(why), self.count())


def _reason(why: Exception) -> str:
    """Few different ones: without names of files."""
    if isinstance(why, StockOnly):
        return str(why)
    if isinstance(why, UnavailableError):
        return f"writer {why.name} does not work there"
    text = why.strerror if isinstance(why, OSError) else None
    return f"{type(why).__name__}: {text}" if text else type(why).__name__


def fallbacks_of(moved: Transfer) -> list[str]:
    """A writer's own fallbacks as text."""
    return [f"{one.wanted} -> {one.used}: {one.reason}" for one in moved.fallbacks]
