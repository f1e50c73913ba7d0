"""The memory agent as a real process: transfers, damage, limits, tokens, and its end."""

from __future__ import annotations

import errno
import os
import resource
import secrets
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.agents import Node, flip, nodes, random_bytes, runtime_directories, through_proxy

from iobench.errors import ReplicaError
from iobench.ranks.wire import Challenge, Hello, Message, Welcome, Wire
from iobench.replicas import protocol
from iobench.replicas.fetch import Fetcher
from iobench.replicas.protocol import (
    AgentDone,
    AgentStatus,
    Facts,
    MemoryCopy,
    RecoveryPlan,
    Segments,
    Version,
    connect,
)
from iobench.replicas.runtime import stop_agent, stop_earlier_agents
from iobench.replicas.segment import digest_of
from iobench.units import MIB
from iobench.writers.image import Bytes

_SIZE = 5 * MIB + 123
_serials = iter(range(1, 10_000))


def _version(step: int = 1) -> Version:
    return Version(next(_serials), step, "start")


@pytest.fixture(scope="module")
def base() -> Iterator[Path]:
    """Where the agents of this module have their directories."""
    with runtime_directories() as made:
        yield made


def test_no_module_of_the_working_directory(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer is started in a directory of other users: the agent runs none of their files."""
    for name in ("xxhash", "queue", "msgspec"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    node = Node(base / "elsewhere", token=secrets.token_bytes(32))
    node.stop()
    assert not (tmp_path / "ran").exists()


@pytest.fixture(scope="module")
def three(base: Path) -> Iterator[list[Node]]:
    """Agents of one job on three nodes, which every test may use with new versions."""
    with nodes(3, base) as made:
        yield made


@pytest.fixture
def alone(base: Path) -> Iterator[Node]:
    """An agent of another job, for tests that break or end it."""
    node = Node(base / "n0", token=secrets.token_bytes(32), job=f"job-{next(_serials)}")
    yield node
    node.stop()


def _fetcher(plan: RecoveryPlan, made: list[Node], node: int) -> Fetcher:
    return Fetcher(
        plan,
        node=node,
        local=lambda: connect(made[node].directory.socket, made[node].token, timeout_s=20),
        remote=lambda address: connect(address, made[0].token, timeout_s=20),
        addresses={number: one.address for number, one in enumerate(made)},
    )


def _held(made: list[Node], version: Version) -> list[MemoryCopy]:
    return [
        MemoryCopy(version, one["rank"], one["ranks"], number)
        for number, node in enumerate(made)
        for one in node.own.ask(Segments, protocol.Inventory()).segments
        if Version(*one["version"]) == version
    ]


def _fetched(fetcher: Fetcher, rank: int, size: int) -> tuple[Bytes, list[str]]:
    memory = np.zeros(size, np.uint8)
    found = fetcher.fetch(rank, 0, memory)
    fetcher.close()
    assert not found.missing
    return memory, found.notes


@pytest.mark.parametrize("size", [0, 1, MIB - 1, MIB, _SIZE])
def test_a_copy_of_a_copy(three: list[Node], size: int) -> None:
    """What a trainer copies is read from its own node and from the partner, byte for byte."""
    version, data = _version(), random_bytes(size, size)
    three[0].copy(7, version, data, b"header")
    pushed = three[0].push(7, version, three[1].address)
    assert pushed.sent_bytes == size
    assert [one.node for one in _held(three, version)] == [0, 1]
    for node in range(3):
        plan = RecoveryPlan(version=version, ranks=8, stored=False, holders={7: (0, 1)})
        fetcher = _fetcher(plan, three, node)
        assert fetcher.part(7).header == b"header"
        memory, notes = _fetched(fetcher, 7, size)
        assert np.array_equal(memory, data)
        assert not notes


@pytest.mark.parametrize("start", [0, 1, MIB - 5, 3 * MIB])
def test_any_range(three: list[Node], start: int) -> None:
    """Ranges need not begin or end at a piece."""
    version, data = _version(), random_bytes(_SIZE)
    three[0].copy(6, version, data)
    plan = RecoveryPlan(version=version, ranks=8, stored=False, holders={6: (0,)})
    for node in (0, 1):
        fetcher = _fetcher(plan, three, node)
        for stop in (start, start + 1, start + MIB + 1, _SIZE):
            memory = np.zeros(stop - start, np.uint8)
            assert not fetcher.fetch(6, start, memory).missing
            assert np.array_equal(memory, data[start:stop])
        fetcher.close()


def test_a_flipped_bit_in_memory_is_replaced_by_the_partner(three: list[Node]) -> None:
    """Only the damaged piece comes from the next source, and the note says so."""
    version, data = _version(), random_bytes(_SIZE, 1)
    three[0].copy(5, version, data)
    three[0].push(5, version, three[1].address)
    for file in three[0].memory_files():
        flip(file, data, 2 * MIB + 1)
    plan = RecoveryPlan(version=version, ranks=8, stored=False, holders={5: (0, 1)})
    fetcher = _fetcher(plan, three, 0)
    memory = np.zeros(_SIZE, np.uint8)
    found = fetcher.fetch(5, 0, memory)
    fetcher.close()
    assert np.array_equal(memory, data)
    assert found.notes == ["rank 5, 1 pieces from node 0: the bytes differ from their checksum"]
    assert found.read_bytes["peer"] == MIB


def test_bits_flipped_in_all_memory_are_missing_and_never_returned(three: list[Node]) -> None:
    """Storage must then provide exactly the damaged piece."""
    version, data = _version(), random_bytes(_SIZE, 2)
    three[0].copy(4, version, data)
    for file in three[0].memory_files():
        flip(file, data, 5 * MIB + 100)
    plan = RecoveryPlan(version=version, ranks=8, stored=True, holders={4: (0,)})
    fetcher = _fetcher(plan, three, 0)
    memory = np.zeros(_SIZE, np.uint8)
    found = fetcher.fetch(4, 0, memory)
    fetcher.close()
    assert found.missing == [(5 * MIB, _SIZE)]
    assert np.array_equal(memory[: 5 * MIB], data[: 5 * MIB])


def test_a_bit_flipped_on_the_wire_is_sent_again(three: list[Node]) -> None:
    """The receiver compares each piece, and asks for the damaged one."""
    version, data = _version(), random_bytes(_SIZE, 3)
    three[0].copy(3, version, data)
    seen = [0]

    def change(part: bytearray) -> None:
        before = seen[0]
        seen[0] += len(part)
        if before < 3 * MIB <= seen[0]:
            part[0] ^= 1

    with through_proxy(three[1].address, change) as address:
        pushed = three[0].push(3, version, address)
    assert pushed.damaged == 1
    plan = RecoveryPlan(version=version, ranks=8, stored=False, holders={3: (1,)})
    memory, _ = _fetched(_fetcher(plan, three, 0), 3, _SIZE)
    assert np.array_equal(memory, data)


def test_a_wire_that_flips_always(three: list[Node]) -> None:
    """After three times the copy fails; nothing is complete at the receiver."""
    version, data = _version(), np.zeros(MIB, np.uint8)
    three[0].copy(2, version, data)

    def change(part: bytearray) -> None:
        if len(part) > 4096 and not part[-1]:
            part[-1] = 1

    with (
        through_proxy(three[1].address, change) as address,
        pytest.raises(ReplicaError, match="arrived damaged 3 times"),
    ):
        three[0].push(2, version, address)
    assert [one.node for one in _held(three, version)] == [0]


def test_a_transfer_that_breaks_leaves_the_last_complete_version(three: list[Node]) -> None:
    """A sender that is killed in the middle leaves an incomplete segment, and the one before."""
    old, new, data = _version(), _version(), random_bytes(_SIZE, 4)
    three[0].copy(1, old, data)
    three[0].push(1, old, three[1].address)
    three[0].copy(1, new, data)
    digests = b"".join(digest_of(data[at : at + MIB]) for at in range(0, _SIZE, MIB))
    with three[1].peer() as peer:
        put = protocol.PutSegment(new, 1, 4, _SIZE, len(digests))
        peer.ask(protocol.MissingPieces, put, digests)
        peer.send(protocol.PutPiece(0), data[:MIB])
    assert [one.node for one in _held(three, old)] == [0, 1]
    assert [one.node for one in _held(three, new)] == [0]
    pushed = three[0].push(1, new, three[1].address)  # the rest of it
    assert pushed.sent_bytes in (_SIZE, _SIZE - MIB)
    assert [one.node for one in _held(three, new)] == [0, 1]


def test_wrong_token(alone: Node) -> None:
    """Neither socket answers a request of someone with another token, and the agent goes on."""
    other = secrets.token_bytes(32)
    with pytest.raises(ReplicaError, match="wrong token: this is another job"):
        connect(alone.address, other, timeout_s=20)
    with pytest.raises(ReplicaError, match="wrong token"):
        connect(alone.directory.socket, other, timeout_s=20)
    assert alone.own.ask(Facts, AgentStatus()).trainers == 1


def test_an_impostor_is_found() -> None:
    """A server that does not know the token cannot prove it: the client sends nothing to it."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def pretend() -> None:
            connection, _ = server.accept()
            wire = Wire(connection, "client", 20)
            wire.send(Challenge("00"))
            wire.receive(Hello)
            wire.send(Welcome("00"))
            wire.close()

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(ReplicaError, match="its proof is wrong"):
            connect(server.getsockname(), b"token", timeout_s=20)
        thread.join()


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n", b"iob1" + b"\xff" * 12, b"", b"iob1"])
def test_something_else_than_frames(alone: Node, sent: bytes) -> None:
    """A port scanner, or a hostile length, costs the agent one connection."""
    with socket.create_connection(alone.address, timeout=20) as connection:
        try:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass
        except OSError as error:
            # The agent may have closed the connection before.
            if error.errno not in (errno.ENOTCONN, errno.ECONNRESET, errno.EPIPE):
                raise
    assert alone.own.ask(Facts, AgentStatus()).segments == []


def test_more_strangers_than_descriptors(alone: Node) -> None:
    """Idle connections neither end the agent nor keep a rank out."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.prlimit(alone.record.pid, resource.RLIMIT_NOFILE, (32, hard))
    strangers = [socket.create_connection(alone.address, timeout=20) for _ in range(36)]
    try:
        rank = connect(alone.address, alone.token, timeout_s=60)
        assert rank.ask(Segments, protocol.Inventory()).segments == []
        rank.close()
    finally:
        for one in strangers:
            one.close()
    assert alone.own.ask(Facts, AgentStatus()).segments == []


class _Settle(Message, tag="settle"):
    version: list[int]
    kept: bool


class _Describe(Message, tag="describe"):
    version: Version
    rank: int


class _Other(Message, tag="no such"):
    pass


@pytest.mark.parametrize(
    "request_", [_Settle([1, 2], True), _Describe(Version(1, 2, "a"), -1), _Other()]
)
def test_a_request_that_is_not_one(alone: Node, request_: Message) -> None:
    """It ends its connection; the others go on."""
    with connect(alone.directory.socket, alone.token, timeout_s=20) as other:
        other.send(request_)
        with pytest.raises(ReplicaError):
            other.receive(AgentDone)
    assert alone.own.ask(Facts, AgentStatus()).segments == []


def test_peers_cannot_stop_or_change_an_agent(alone: Node) -> None:
    """Through the network only transfers and reads are possible."""
    with alone.peer() as peer, pytest.raises(ReplicaError, match="'stop' is for ranks of this"):
        peer.ask(AgentDone, protocol.Stop())
    assert alone.record.alive


def test_memory_that_does_not_fit_the_budget(alone: Node) -> None:
    """It is refused before it is taken; what was there stays."""
    alone.own.ask(AgentDone, protocol.Start([0], 1, 8 * MIB))
    first = _version()
    alone.copy(0, first, random_bytes(4 * MIB))
    with pytest.raises(ReplicaError, match=r"budget: 4\.00 MiB of 8\.00 MiB are taken"):
        alone.copy(0, _version(), random_bytes(5 * MIB))
    status = alone.own.ask(Facts, AgentStatus())
    assert status.taken_bytes == 4 * MIB
    assert [one["version"] for one in status.segments] == [list(first)]


def test_an_agent_yields_to_the_trainer(alone: Node) -> None:
    """Its threads have a low priority, and so has its session: without that, their nice values do
    not count against processes of other sessions."""
    pid = alone.record.pid
    assert os.getpriority(os.PRIO_PROCESS, pid) == 10
    session = Path(f"/proc/{pid}/autogroup")
    if not session.exists():
        pytest.skip("this kernel has no groups of sessions (CONFIG_SCHED_AUTOGROUP)")
    assert session.read_text().split()[1:] == ["nice", "10"]


def test_stop_frees_everything(base: Path, alone: Node) -> None:
    """The process, its memory and its files are gone; a second stop finds nothing."""
    alone.copy(0, _version(), random_bytes(MIB))
    assert len(alone.memory_files()) == 1
    assert stop_agent(alone.directory)
    assert not alone.record.alive
    assert not alone.directory.path.exists()
    assert not stop_agent(alone.directory)


def test_a_stopped_process_is_killed(alone: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that does not answer (SIGSTOP) still gives its memory back."""
    monkeypatch.setattr("iobench.replicas.runtime._STOP_S", 0.3)
    os.kill(alone.record.pid, signal.SIGSTOP)
    assert stop_agent(alone.directory)
    assert not alone.record.alive


def test_an_agent_without_ranks_ends(base: Path) -> None:
    """Nobody came back within `keep_s`: the memory is free again."""
    node = Node(base / "n1", token=secrets.token_bytes(32), job="short", keep_s=0)
    node.own.close()
    deadline = time.monotonic() + 20
    while node.record.alive:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not node.directory.path.exists()


def test_an_agent_whose_directory_was_removed_ends(base: Path) -> None:
    """No rank could find it again."""
    node = Node(base / "n1", token=secrets.token_bytes(32), job="removed")
    shutil.rmtree(node.directory.path)
    deadline = time.monotonic() + 20
    while node.record.alive:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    node.own.close()


def test_agents_of_earlier_jobs(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new job at the same location stops the agent of the one before, unless ranks use it."""
    monkeypatch.setenv("IOBENCH_AGENTS", str(base / "n2"))
    earlier = Node(base / "n2", token=secrets.token_bytes(32), job="earlier")
    assert stop_earlier_agents("later", "/runs/a") == []
    assert stop_earlier_agents("later", "/runs/other") == []
    earlier.own.close()
    stopped = []
    deadline = time.monotonic() + 20
    while not stopped:  # it learns of the end of a connection in a thread
        assert time.monotonic() < deadline
        stopped = [one.job for one in stop_earlier_agents("later", "/runs/a")]
    assert "earlier" in stopped
