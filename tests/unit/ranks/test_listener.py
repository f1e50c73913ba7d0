"""Wire and Listener: what strangers may take of a process that listens, and who is no stranger."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from iobench.errors import ReplicaError
from iobench.ranks import calls
from iobench.ranks import hub as module
from iobench.ranks.hub import Hub
from iobench.ranks.wire import (
    HEAD,
    Challenge,
    Hello,
    Listener,
    Message,
    Welcome,
    Wire,
    introduce,
    pack,
)


class _Text(Message):
    text: str


@pytest.fixture
def pair() -> Iterator[tuple[Wire, Wire]]:
    """Two ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname(), timeout=60)
        other, _ = server.accept()
    with Wire(one, "a rank", 60) as a, Wire(other, "the server", 60, failure=ReplicaError) as b:
        yield a, b


class _Server:
    """A Listener that welcomes who proves the token, when the test lets it."""

    def __init__(self, most: int = 9, greeting_s: float = 60) -> None:
        server = socket.create_server(("127.0.0.1", 0))
        self.address = server.getsockname()
        self.admitted, self.go = queue.SimpleQueue[Hello](), threading.Event()
        self.listener = Listener(
            server,
            token=b"token",
            purpose="test",
            admit=self._admit,
            most=most,
            greeting_s=greeting_s,
            host="here",
        )

    def _admit(self, wire: Wire, hello: Hello, welcome: Welcome) -> None:
        self.admitted.put(hello)
        self.go.wait(60)
        wire.send(welcome)
        wire.close()

    def knock(self) -> Wire:
        """Connect."""
        return Wire(socket.create_connection(self.address, timeout=60), "the listener", 60)


@contextmanager
def _server(most: int = 9, greeting_s: float = 60) -> Iterator[_Server]:
    made = _Server(most, greeting_s)
    try:
        yield made
    finally:
        made.go.set()
        made.listener.close()


def test_both_ends_prove_the_token() -> None:
    """The end that listens decides whom it takes before it answers: a server counts ranks then."""
    with _server() as server, server.knock() as wire:
        found: list[Welcome] = []
        thread = threading.Thread(
            target=lambda: found.append(introduce(wire, b"token", "test", rank=3, host="there"))
        )
        thread.start()
        hello = server.admitted.get(timeout=60)
        assert (hello.rank, hello.host) == (3, "there")
        assert found == []
        server.go.set()
        thread.join()
        assert found[0].host == "here"


@pytest.mark.parametrize(
    ("token", "purpose"), [(b"another", "test"), (b"token", "another"), (b"", "test")]
)
def test_a_stranger_is_refused(token: bytes, purpose: str) -> None:
    """So is a proof for another purpose."""
    with _server() as server, server.knock() as wire:
        with pytest.raises(ConnectionError, match="wrong token: this is another job"):
            introduce(wire, token, purpose)
        assert server.admitted.empty()


def test_a_proof_is_for_what_it_says(pair: tuple[Wire, Wire]) -> None:
    """Whoever changes the rank in a valid proof, or sends a proof back, is refused."""
    with _server() as server, server.knock() as wire, server.knock() as other:
        challenge, _ = wire.receive(Challenge)
        one, two = pair
        one.send(challenge)
        two.limit(0.1)
        with pytest.raises(ReplicaError):
            introduce(two, b"token", "test", rank=1)
        hello, _ = one.receive(Hello)
        wire.send(Hello(hello.nonce, hello.proof, rank=2))
        with pytest.raises(ConnectionError, match="wrong token"):
            wire.receive(Welcome)
        other.receive(Challenge)
        other.send(hello)  # for another challenge
        with pytest.raises(ConnectionError, match="wrong token"):
            other.receive(Welcome)
        assert server.admitted.empty()


def test_an_impostor_is_found(pair: tuple[Wire, Wire]) -> None:
    """An end that listens and does not know the token can only send the proof back."""
    one, two = pair

    def pretend() -> None:
        one.send(Challenge("00"))
        hello, _ = one.receive(Hello)
        one.send(Welcome(hello.proof))

    thread = threading.Thread(target=pretend)
    thread.start()
    with pytest.raises(ReplicaError, match="the server belongs to another job"):
        introduce(two, b"token", "test")
    thread.join()


def test_too_many() -> None:
    """The oldest stranger is ended for a new one; a rank is still let in."""
    with _server(most=2) as server:
        server.go.set()
        wires = []
        for _ in range(3):
            wires.append(server.knock())
            wires[-1].receive(Challenge)
        with pytest.raises(ConnectionError):
            wires[0].receive(Message)
        with server.knock() as rank:
            introduce(rank, b"token", "test")
        with pytest.raises(ConnectionError):
            wires[1].receive(Message)
        wires[2].limit(0.1)  # it stays
        with pytest.raises(ConnectionError, match="did not send a byte for"):
            wires[2].receive(Message)
        for wire in wires:
            wire.close()


def test_too_late() -> None:
    """A stranger that sends a byte now and then does not stay, however soon the next one comes."""
    with _server(greeting_s=0.2) as server, server.knock() as wire:
        wire.receive(Challenge)
        ended = threading.Event()

        def drip() -> None:
            with contextlib.suppress(OSError):
                for byte in pack(Hello("00", "00")):
                    wire._socket.send(bytes([byte]))
                    ended.wait(0.1)

        thread = threading.Thread(target=drip)
        thread.start()
        with pytest.raises(ConnectionError, match=r"(closed|ended) the connection"):
            wire.receive(Welcome)  # not "wrong token": it was not heard to the end
        ended.set()
        thread.join()


def test_a_long_message_of_a_stranger(pair: tuple[Wire, Wire]) -> None:
    """No memory is taken for it, and no byte of it is awaited; a trusted end may send it."""
    one, two = pair
    two.send(_Text("x" * 5000))
    with pytest.raises(ConnectionError, match="something other than messages"):
        one.receive(_Text)
    two.trust()
    one.send(_Text("x" * 5000))
    assert two.receive(_Text) == (_Text("x" * 5000), 0)


@pytest.mark.parametrize("sent", [b"", b"iob1", pack(_Text("a"))[:-1], pack(_Text("a"), 1)])
def test_a_message_that_ends(pair: tuple[Wire, Wire], sent: bytes) -> None:
    """The end of a connection is an error, between messages too."""
    one, two = pair
    two.trust()
    one._socket.sendall(sent)
    one.close()
    with pytest.raises(ReplicaError, match="the server closed the connection"):
        two.take(two.receive(_Text)[1])


def test_strangers_at_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle ones are ended when there are too many; a deeply nested hello ends its connection."""
    monkeypatch.setattr(module, "_GREETING_S", 600)
    server = socket.create_server(("127.0.0.1", 0))
    hub = Hub(server, size=1, token="token", host="here", lost_after_s=5)
    address, idle = server.getsockname(), list[socket.socket]()
    try:
        for _ in range(module._STRANGERS + 2):
            idle.append(socket.create_connection(address, timeout=60))
            text, _ = HEAD.unpack(idle[-1].recv(HEAD.size, socket.MSG_WAITALL))[1:]
            assert b"nonce" in idle[-1].recv(text, socket.MSG_WAITALL)
        assert idle[0].recv(1) == b""
        nested = b"[" * 2000 + b"]" * 2000
        idle[-1].sendall(HEAD.pack(b"iob1", len(nested), 0) + nested)
        assert idle[-1].recv(1) == b""
        idle[-2].sendall(pack(Hello("00"))[:-1])  # one byte is missing: it stays
        idle[-2].setblocking(False)
        with pytest.raises(BlockingIOError):
            idle[-2].recv(1)
    finally:
        for one in idle:
            one.close()
        hub._broken = calls.Broken([0], "the test ends")
        hub.close()
    assert not [one for one in threading.enumerate() if one.name == "iobench-hub"]
