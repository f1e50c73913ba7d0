"""Hub and its messages: what is sent, and how often."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from iobench.ranks import hub as hub_module
from iobench.ranks.hub import _ROOM, Hub, _packed, _Round
from iobench.ranks.member import _greet, _read
from iobench.ranks.messages import PREFIX, Message, json_bytes, length_of, pack, split

_HEAD: Message = {"acknowledged": False, "source": 1, "error": None}


def _round(kind: str, values: list[bytes]) -> _Round:
    sent = {rank: (_HEAD, value) for rank, value in enumerate(values)}
    return _Round(phase="a", kind=kind, until_s=9, deadline_s=9, sent=sent)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("all-gather", [b"1,2,3"] * 3),
        ("gather", [b"1,2,3", b"", b""]),
        ("broadcast", [b"2"] * 3),
        ("barrier", [b""] * 3),
    ],
)
def test_an_answer_is_packed_once(kind: str, expected: list[bytes]) -> None:
    """Ranks that get the same bytes share them: to pack them for each takes the square of time."""
    packed = _packed(_round(kind, [b"1", b"2", b"3"]), {"type": "answer"})
    assert [split(one[PREFIX.size :])[1] for one in packed] == expected
    assert len({id(one) for one in packed}) == len(set(expected))


def test_equal_values_are_sent_once() -> None:
    """Hashes of a replicated state are equal in all ranks."""
    packed = _packed(_round("all-gather", [b'"hash"'] * 1000), {"type": "answer"})
    assert split(packed[7][PREFIX.size :]) == ({"type": "answer", "times": 1000}, b'"hash"')


def test_each_rank_gets_its_own_value() -> None:
    """The values of a scatter are lines."""
    packed = _packed(_round("scatter", [b'"a"\n{"b":1}\nnull', b"null", b"null"]), {})
    assert [split(one[PREFIX.size :])[1] for one in packed] == [b'"a"', b'{"b":1}', b"null"]


@pytest.mark.parametrize("value", ["name-\udcff", "two\nlines", float("inf"), [1, None]])
def test_values_arrive_as_they_are(value: object) -> None:
    """Also names of files that are not UTF-8."""
    message, values = split(pack({"phase": "a\n"}, json_bytes(value))[PREFIX.size :])
    assert (message, json.loads(values)) == ({"phase": "a\n"}, value)


def test_a_plan_of_many_gigabytes() -> None:
    """Only what a stranger sends is limited."""
    assert length_of(PREFIX.pack(5 << 30)) == 5 << 30
    with pytest.raises(ConnectionError, match="5000 bytes: this is not a rank of the job"):
        length_of(PREFIX.pack(5000), hello=True)


@contextmanager
def _hub(
    size: int, lost_after_s: float = 60
) -> Iterator[tuple[socket.socket, list[socket.socket]]]:
    """Yield the socket of a hub, and a connection of each rank that has proven itself."""
    server = socket.create_server(("127.0.0.1", 0))
    hub = Hub(server, size=size, token="token", host="here", lost_after_s=lost_after_s)
    with ExitStack() as stack:
        stack.callback(hub.abandon, "the test ends")
        ranks = []
        for rank in range(size):
            one = stack.enter_context(socket.create_connection(server.getsockname(), timeout=30))
            _greet(one, rank, "token", "here", 30)
            ranks.append(one)
        yield server, ranks


def test_the_queue_of_connections() -> None:
    """asyncio would set it to 100, and ranks beyond would wait for seconds (tcp(7))."""
    with _hub(1) as (server, _):
        info = server.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32)
        (longest,) = struct.unpack_from("I", info, 28)  # tcpi_sacked of a socket that listens
    assert longest == min(_ROOM, int(Path("/proc/sys/net/core/somaxconn").read_text()))


def _put(rank: socket.socket, number: int) -> None:
    head = {"type": "put", "sub": "", "number": number, "kind": "barrier", "phase": "last"}
    rest = {"aside": False, "error": None, "deadline_s": 60, "source": 0, "acknowledged": True}
    rank.sendall(pack({**head, **rest}, b"null"))


def _next(rank: socket.socket) -> Message:
    return split(_read(rank))[0]


@pytest.mark.parametrize("how", ["acknowledge", "close", "end"])
def test_rank_0_is_answered_last(how: str) -> None:
    """When all others have their answers, or have ended. Its process may end then."""
    with _hub(3) as (_, ranks):
        for rank in ranks:
            _put(rank, 0)
        for rank in ranks[1:]:
            assert _next(rank)["type"] == "answer"
        ranks[1].sendall(pack({"type": "acknowledge", "sub": "", "number": 0}))
        ranks[0].settimeout(0.2)
        with pytest.raises(TimeoutError):
            ranks[0].recv(1)
        ranks[0].settimeout(30)
        if how == "end":
            ranks[2].close()
        else:
            ranks[2].sendall(pack({"type": how, "sub": "", "number": 0}))
        assert _next(ranks[0])["type"] == "answer"
        if how == "end":
            assert _next(ranks[0])["ranks"] == [2]


def test_no_silent_rank_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rank 0 is cut off, all others are silent at once: none of them acknowledges."""
    monkeypatch.setattr(hub_module, "_ACKNOWLEDGE_S", 1e9)
    with _hub(4, lost_after_s=0.5) as (_, ranks):
        for rank in ranks:
            _put(rank, 0)
        assert _next(ranks[0])["type"] == "answer"
        assert _next(ranks[0])["type"] == "broken"
