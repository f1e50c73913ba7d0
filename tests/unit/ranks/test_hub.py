"""Hub and its messages: what is sent, and how often."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from iobench.ranks import calls
from iobench.ranks import hub as hub_module
from iobench.ranks.calls import Call, CallAnswer, CallKind, FromHub, json_bytes
from iobench.ranks.hub import Hub, _packed, _Round
from iobench.ranks.wire import HEAD, Wire, decoded, introduce, lengths, pack, sendable

_KEY = ("", 0)


def _put(kind: CallKind, number: int = 0, *, acknowledged: bool = True) -> Call:
    return Call(("", number), kind, "a", 60, acknowledged=acknowledged)


def _round(kind: CallKind, values: list[bytes]) -> _Round:
    sent = {rank: (_put(kind), value) for rank, value in enumerate(values)}
    return _Round(first=_put(kind), until_s=9, sent=sent)


def _opened(packed: bytes) -> tuple[Any, bytes]:
    """The message and the bytes after it."""
    text, payload = lengths(packed[: HEAD.size])
    rest = packed[HEAD.size :]
    assert len(rest) == text + payload
    return decoded(rest[:text], FromHub), rest[text:]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("all-gather", [b"1,2,3"] * 3),
        ("gather", [b"1,2,3", b"", b""]),
        ("broadcast", [b"1"] * 3),
    ],
)
def test_an_answer_is_packed_once(kind: CallKind, expected: list[bytes]) -> None:
    """Ranks that get the same bytes share them: to pack them for each takes the square of time."""
    packed = _packed(_round(kind, [b"1", b"2", b"3"]), _KEY, False)
    assert [_opened(one)[1] for one in packed] == expected
    assert len({id(one) for one in packed}) == len(set(expected))


def test_values_of_ranks() -> None:
    """Hashes of a replicated state are equal in all ranks: they are sent once. Each rank gets its
    own value of a scatter, whose values are lines."""
    packed = _packed(_round("all-gather", [b'"hash"'] * 1000), _KEY, False)
    assert _opened(packed[7]) == (CallAnswer(_KEY, False, times=1000), b'"hash"')
    packed = _packed(_round("scatter", [b'"a"\n{"b":1}\nnull', b"null", b"null"]), _KEY, False)
    assert [_opened(one)[1] for one in packed] == [b'"a"', b'{"b":1}', b"null"]


@pytest.mark.parametrize("value", ["name-\udcff", "two\nlines", float("inf"), [1, None]])
def test_values_arrive_as_they_are(value: object) -> None:
    """Also names of files that are not UTF-8; in a message they have escapes."""
    answer = CallAnswer(_KEY, False, errors=[(0, "host", sendable(f"a\n{value}"))])
    packed = json_bytes(value)
    message, values = _opened(pack(answer, len(packed)) + packed)
    assert (message, json.loads(values)) == (answer, value)


def test_a_plan_of_many_gigabytes() -> None:
    """Only what a stranger sends is limited: it sends no values, and a short message."""
    head = HEAD.pack(b"iob1", 10, 5 << 30)
    assert lengths(head) == (10, 5 << 30)
    with pytest.raises(ConnectionError, match="bytes before it has proven who it is"):
        lengths(head, stranger=True)
    with pytest.raises(ConnectionError, match="something other than messages of iobench"):
        lengths(HEAD.pack(b"iob1", 5000, 0), stranger=True)


@contextmanager
def _hub(size: int, lost_after_s: float = 60) -> Iterator[tuple[socket.socket, list[Wire]]]:
    """Yield the socket of a hub, and a connection of each rank that has proven itself."""
    server = socket.create_server(("127.0.0.1", 0))
    hub = Hub(server, size=size, token="token", host="here", lost_after_s=lost_after_s)
    with ExitStack() as stack:
        stack.callback(hub.abandon, "the test ends")
        ranks = []
        for rank in range(size):
            connection = socket.create_connection(server.getsockname(), timeout=30)
            ranks.append(stack.enter_context(Wire(connection, "rank 0", 30)))
            introduce(ranks[-1], b"token", calls.PURPOSE, rank=rank)
        yield server, ranks


def _next(rank: Wire) -> FromHub:
    message, length = rank.receive(FromHub)
    rank.take(length)
    return message


@pytest.mark.parametrize("how", [calls.Acknowledge(_KEY), calls.Close(), None])
def test_rank_0_is_answered_last(how: calls.FromRank | None) -> None:
    """When all others have their answers, or have ended. Its process may end then."""
    with _hub(3) as (_, ranks):
        for rank in ranks:
            rank.send(_put("all-gather"), b"null")
        for rank in ranks[1:]:
            assert isinstance(_next(rank), CallAnswer)
        ranks[1].send(calls.Acknowledge(_KEY))
        ranks[0].limit(0.2)
        with pytest.raises(ConnectionError, match="did not send a byte"):
            _next(ranks[0])
        ranks[0].limit(30)
        if how is None:
            ranks[2].close()
        else:
            ranks[2].send(how)
        assert isinstance(_next(ranks[0]), CallAnswer)
        if how is None:
            broken = _next(ranks[0])
            assert isinstance(broken, calls.Broken)
            assert broken.ranks == [2]


def test_a_rank_that_is_connected_already() -> None:
    """The second one is told so; the first one goes on."""
    with _hub(2) as (server, ranks):
        connection = socket.create_connection(server.getsockname(), timeout=30)
        with Wire(connection, "rank 0", 30) as second:
            introduce(second, b"token", calls.PURPOSE, rank=1)
            broken = _next(second)
        assert isinstance(broken, calls.Broken)
        assert broken.message == "rank 1 is connected already"
        for rank in ranks:
            rank.send(_put("all-gather", acknowledged=False), b"null")
        assert all(isinstance(_next(rank), CallAnswer) for rank in ranks)


@pytest.mark.slow
def test_no_silent_rank_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rank 0 is cut off, all others are silent at once: none of them acknowledges."""
    monkeypatch.setattr(hub_module, "_ACKNOWLEDGE_S", 1e9)
    with _hub(4, lost_after_s=0.5) as (_, ranks):
        for rank in ranks:
            rank.send(_put("all-gather"), b"null")
        assert isinstance(_next(ranks[0]), CallAnswer)
        assert isinstance(_next(ranks[0]), calls.Broken)
