"""Redirect: passes the calls of one stock function to the writer, or to stock where they differ."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from iobench.errors import UnavailableError
from iobench.integrations.redirect.call_counts import CallCounts, Count
from iobench.integrations.replacing import bypass, bypass_reason, bypassed
from iobench.integrations.stock_path import (
    NotPicklable,
    Unsupported,
    check_stock_can,
)
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
        """Return the replacement of a function that saves.

        `prepare` describes the file and returns a function that writes it; it raises for calls that
        stock must make. Errors of the write and of pickling are raised and not retried by stock.
        For an object in a bucket, where stock cannot write, every error is raised.
        """

        def save(call: RedirectedCall) -> Any:
            refused: Exception | None = None
            try:
                with bypass(_NESTED):
                    write = prepare(*call.args, **call.kwargs)
            except NotPicklable as why:  # stock would raise it too, after truncating the old file
                call.failed()
                raise why.error from None
            except Exception as why:  # noqa: BLE001 -- reported, and stock makes the call
                refused = why
            if refused is None:
                try:
                    with bypass(_NESTED):
                        call.redirected(write())
                    return None
                except UnavailableError as why:
                    refused = why
                except Exception:
                    call.failed()
                    raise
            call.check("write to", refused)
            call.report(refused)
            return call.stock(refused)

        return self._replaced(save)

    def loading(self, load: Callable[..., tuple[Any, Transfer]]) -> Callable[..., Any]:
        """Return the replacement of a function that loads.

        After any error of `load` stock makes the call, so that callers see the errors that they
        know. For an object in a bucket the error is raised: stock would report the object missing.
        """

        def loading(call: RedirectedCall) -> Any:
            try:
                with bypass(_NESTED):
                    found, moved = load(*call.args, **call.kwargs)
            except Exception as why:  # noqa: BLE001 -- counted, and stock makes the call
                refused = why
            else:
                call.redirected(moved)
                return found
            call.check("read", refused)
            return call.stock(refused)

        return self._replaced(loading)

    def _replaced(self, ours: Callable[[RedirectedCall], Any]) -> Callable[..., Any]:
        """Return the function that lets `ours` make all calls but those of iobench itself."""

        @functools.wraps(self.stock)
        def either(*args: Any, **kwargs: Any) -> Any:
            reason = bypass_reason()
            own = bypassed() and not reason
            if own or isinstance(self.file_of(args, kwargs), BlockStream):
                return self.stock(*args, **kwargs)
            call = RedirectedCall(self, args, kwargs)
            return call.stock(Unsupported(reason)) if reason else ours(call)

        return either

    def file_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the file argument of a call; None if the call has none."""
        position, name = self.file
        return args[position] if len(args) > position else kwargs.get(name)


class RedirectedCall:
    """One call of a redirected function, with its arguments and its start time."""

    def __init__(self, redirect: Redirect, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._redirect, self.args, self.kwargs = redirect, args, kwargs
        self._began = time.perf_counter()
        self._given = file = redirect.file_of(args, kwargs)
        self._file = os.fsdecode(file) if isinstance(file, (str, bytes, os.PathLike)) else ""

    def count(self, size_bytes: int = 0) -> Count:
        """Return this call as a Count, with the seconds until now."""
        seconds = time.perf_counter() - self._began
        return Count(calls=1, bytes=size_bytes, seconds=seconds, example=self._file)

    def redirected(self, moved: Transfer) -> None:
        redirect = self._redirect
        redirect.counts.redirected(redirect.name, self.count(moved.bytes), fallbacks_of(moved))

    def failed(self) -> None:
        self._redirect.counts.failed(self._redirect.name, self.count())

    def check(self, doing: Literal["read", "write to"], why: Exception) -> None:
        """Raise if stock cannot make the call, and count that failure; see `check_stock_can`."""
        try:
            check_stock_can(doing, self._redirect.name, self._given, why)
        except Exception:
            self.failed()
            raise

    def report(self, why: Exception) -> None:
        """Print the error behind a fallback at once; each reason once."""
        reason = reason_of(why)
        if not isinstance(why, Unsupported) and reason not in self._redirect._reported:
            self._redirect._reported.add(reason)
            self._redirect.counts.say(
                f"{self._redirect.name}({self._file}) is done by the stock function: {why}"
            )

    def stock(self, why: Exception) -> Any:
        """Call the stock function, count the call with its reason, and return the result."""
        self._began = time.perf_counter()
        try:
            return self._redirect.stock(*self.args, **self.kwargs)
        finally:
            self.was_stock(why)

    def was_stock(self, why: Exception) -> None:
        """Count the call of the stock function with its reason."""
        self._redirect.counts.stock(self._redirect.name, reason_of(why), self.count())


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
