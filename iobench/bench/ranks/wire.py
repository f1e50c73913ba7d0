"""Commands to the ranks and their replies, as plain JSON values: no pickle is sent or loaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, TypeVar, get_type_hints

from iobench.bench.processes.job import Job
from iobench.bench.ranks.rank_job import RankJob
from iobench.errors import JobError
from iobench.results.codec import from_plain, to_plain

T = TypeVar("T")


def message_of(what: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the message for `partial(Job.method, name=value)`, also of RankJob.

    Raises ValueError for anything else: only methods of a job, with named arguments, have a
    message.
    """
    method, given = (what.func, what.keywords) if isinstance(what, partial) else (what, {})
    name = getattr(method, "__name__", "")
    known = getattr(Job, name, None), getattr(RankJob, name, None)
    if method not in known or (isinstance(what, partial) and what.args):
        raise ValueError(f"{what!r} is not a method of Job with named arguments")
    return {"do": name, "with": to_plain(given)}


def command_of(message: Any) -> Callable[[RankJob], Any]:
    """Return the command in `message`. Raises ValueError if it is not one of `message_of`."""
    name, given = message["do"], message["with"]
    types = _types(name)
    if not set(given) <= set(types):
        raise ValueError(f"{name} has no argument {', '.join(sorted(set(given) - set(types)))}")
    values = {key: from_plain(types[key], value) for key, value in given.items()}
    return partial(_call, name, values)


def _call(name: str, values: dict[str, Any], job: RankJob) -> Any:
    return getattr(job, name)(**values)


def reply_of(what: Callable[[Any], T], plain: Any, who: str) -> T:
    """Return the reply to `what` from its plain values. Raises JobError if they are not valid."""
    method = getattr(what, "func", what)
    try:
        reply: T = from_plain(_types(method.__name__)["return"], plain)
    except ValueError as error:
        raise JobError(f"{who}: its reply to {method.__name__} is not valid ({error})") from None
    return reply


@cache
def _types(name: str) -> dict[str, Any]:
    """Return the types of the arguments of a method of RankJob, and of its return value."""
    method = getattr(RankJob, name, None)
    if name.startswith("_") or not callable(method):
        raise ValueError(f"{name!r} is not a command")
    return get_type_hints(method)
