"""Newcomers: what strangers may take of a process that listens."""

from __future__ import annotations

import os
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from iobench.errors import ReplicaError
from iobench.ranks import hub as module
from iobench.ranks.hub import Hub
from iobench.ranks.messages import PREFIX, pack, unpack
from iobench.ranks.newcomers import Newcomers
from iobench.replicas.frames import Wire
from iobench.replicas.runtime import AgentDirectory, AgentRecord, start_of


def test_too_many() -> None:
    """The oldest one is ended for a new one; those that were removed do not count."""
    ended: list[int] = []
    made = Newcomers(2, 60)
    for number in range(3):
        made.add(number, lambda number=number: ended.append(number))
    assert ended == [0]
    made.remove(1)
    made.remove(1)
    made.add(3, lambda: ended.append(3))
    assert ended == [0]
    made.end_oldest()
    made.end_oldest()
    made.end_oldest()
    assert ended == [0, 2, 3]


def test_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that sends a byte now and then does not stay either."""
    now_s, ended = [100.0], list[str]()
    monkeypatch.setattr("iobench.ranks.newcomers.time.monotonic", lambda: now_s[0])
    made = Newcomers(9, 10)
    made.add("early", lambda: ended.append("early"))
    now_s[0] = 105
    made.add("late", lambda: ended.append("late"))
    made.end_late()
    assert ended == []
    now_s[0] = 111
    made.end_late()
    assert ended == ["early"]


def test_a_long_message_of_a_stranger() -> None:
    """No memory is taken for it, and no byte of it is awaited; a trusted end may send it."""
    one, other = socket.socketpair()
    wire, client = Wire(one, "a stranger", 60), Wire(other, "the agent", 60)
    client.send({"text": "x" * 5000})
    with pytest.raises(ReplicaError, match="other than frames"):
        wire.receive()
    wire.close()
    client.close()
    one, other = socket.socketpair()
    wire, client = Wire(one, "a rank", 60), Wire(other, "the agent", 60)
    wire.trust()
    client.send({"text": "x" * 5000})
    assert wire.receive() == ({"text": "x" * 5000}, 0)
    wire.close()
    client.close()


@contextmanager
def _no_descriptor_free() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_agent_without_a_free_descriptor(tmp_path: Path) -> None:
    """It cannot read whether it is still the agent of its job, and stays."""
    directory, pid = AgentDirectory(tmp_path / "agent"), os.getpid()
    directory.set_token(b"token")
    assert not directory.names(pid)
    started = start_of(pid)
    assert started is not None
    directory.set_record(
        AgentRecord(pid=pid, started=started, job="job", location="", address=("::1", 1))
    )
    with _no_descriptor_free():
        with pytest.raises(OSError, match="Too many open files"):
            (tmp_path / "agent").open()
        assert directory.names(pid)
    assert directory.names(pid)
    assert not directory.names(pid + 1)
    directory.remove()
    assert not directory.names(pid)


def test_strangers_at_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle ones are ended when there are too many; a deeply nested hello ends its connection."""
    monkeypatch.setattr(module, "_GREETING_S", 600)
    server = socket.create_server(("127.0.0.1", 0))
    hub = Hub(server, size=1, token="token", host="here", lost_after_s=5)
    address, idle = server.getsockname(), list[socket.socket]()
    try:
        for _ in range(module._STRANGERS + 2):
            idle.append(socket.create_connection(address, timeout=60))
            assert unpack(_received(idle[-1]))["type"] == "nonce"
        assert idle[0].recv(1) == b""
        nested = b"[" * 2000 + b"]" * 2000
        idle[-1].sendall(PREFIX.pack(len(nested)) + nested)
        assert idle[-1].recv(1) == b""
        idle[-2].sendall(pack({"rank": 1})[:-1])  # one byte is missing: it stays
        idle[-2].setblocking(False)
        with pytest.raises(BlockingIOError):
            idle[-2].recv(1)
    finally:
        for one in idle:
            one.close()
        hub._broken = {"ranks": [0]}
        hub.close()
    assert not [one for one in threading.enumerate() if one.name == "iobench-hub"]


def _received(connection: socket.socket) -> bytes:
    (length,) = PREFIX.unpack(connection.recv(PREFIX.size, socket.MSG_WAITALL))
    return connection.recv(length, socket.MSG_WAITALL)
