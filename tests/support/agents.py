"""Memory agents for tests: "nodes" of one machine, each with its own runtime directory."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np

from iobench.ranks.wire import Wire
from iobench.replicas.protocol import (
    Address,
    AgentDone,
    Begin,
    Filled,
    Push,
    Pushed,
    Version,
    connect,
)
from iobench.replicas.runtime import AgentDirectory, AgentRecord, start_agent, stop_agent
from iobench.replicas.segment import PIECE, digest_of
from iobench.writers.image import Bytes

__all__ = ["Node", "flip", "nodes", "random_bytes", "runtime_directories", "through_proxy"]


@contextmanager
def runtime_directories() -> Iterator[Path]:
    """A directory for runtime directories; short, because the name of a unix socket must be.

    At the end it fails the test if an agent is left, and stops it.
    """
    base = Path(tempfile.mkdtemp(prefix="iobench-test-", dir="/dev/shm"))
    try:
        yield base
    finally:
        left = [AgentDirectory(path.parent) for path in base.glob("*/*/agent.json")]
        running = [str(one.path) for one in left if stop_agent(one)]
        shutil.rmtree(base)
        assert not running, f"agents were left: {running}"


class Node:
    """An agent that this process started, with a connection like that of a trainer."""

    def __init__(self, base: Path, *, token: bytes, job: str = "job", keep_s: float = 60) -> None:
        base.mkdir(mode=0o700, exist_ok=True)
        self.token = token
        self.directory = AgentDirectory(base / job)
        self.record: AgentRecord = start_agent(
            self.directory, token, host="127.0.0.1", job=job, location="/runs/a", keep_s=keep_s
        )
        self.own = connect(self.directory.socket, token, timeout_s=20)

    @property
    def address(self) -> Address:
        return self.record.address

    def peer(self) -> Wire:
        """Connect like another node."""
        return connect(self.address, self.token, timeout_s=20)

    def copy(
        self, rank: int, version: Version, memory: Bytes, header: bytes = b"", ranks: int = 4
    ) -> None:
        """Copy like a trainer: into the segment, then its header."""
        named = version, rank, ranks, len(memory)
        self.own.ask(AgentDone, Begin(*named))
        fd = self.own.receive_fd()
        os.pwrite(fd, memory.data, 0)
        os.close(fd)
        pieces = [memory[at : at + PIECE] for at in range(0, len(memory), PIECE)]
        digests = b"".join(map(digest_of, pieces))
        self.own.ask(AgentDone, Filled(*named, len(digests)), digests, header)

    def push(self, rank: int, version: Version, address: Address) -> Pushed:
        """Let the agent send a rank's bytes to another one."""
        return self.own.ask(Pushed, Push(version, rank, address))

    def memory_files(self) -> list[Path]:
        """The open memory files of the agent."""
        files = Path(f"/proc/{self.record.pid}/fd").iterdir()
        return [fd for fd in files if "iobench-replica" in os.readlink(fd)]

    def stop(self) -> None:
        """End the agent."""
        self.own.close()
        stop_agent(self.directory)


@contextmanager
def nodes(count: int, base: Path) -> Iterator[list[Node]]:
    """Agents of one job on `count` nodes."""
    token = secrets.token_bytes(32)
    made: list[Node] = []
    with ExitStack() as stack:
        for number in range(count):
            made.append(Node(base / f"n{number}", token=token))
            stack.callback(made[-1].stop)
        yield made


def random_bytes(size: int, seed: int = 0) -> Bytes:
    """Return `size` random bytes."""
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def flip(file: Path, content: Bytes, at: int) -> None:
    """Flip one bit of a memory file, if it holds `content`."""
    fd = os.open(file, os.O_RDWR)
    try:
        if os.pread(fd, 64, 0) == content[:64].tobytes():
            os.pwrite(fd, bytes([int(content[at]) ^ 1]), at)
    finally:
        os.close(fd)


@contextmanager
def through_proxy(address: Address, change: Callable[[bytearray], None]) -> Iterator[Address]:
    """A TCP proxy to `address`; `change` may change what the client sends, part by part."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                upstream = socket.create_connection(address)
                for source, sink, changes in ((client, upstream, True), (upstream, client, False)):
                    threading.Thread(target=pump, args=(source, sink, changes)).start()

        def pump(source: socket.socket, sink: socket.socket, changes: bool) -> None:
            try:
                while data := bytearray(source.recv(1 << 16)):
                    if changes:
                        change(data)
                    sink.sendall(data)
            except OSError:
                pass
            finally:
                for one in (source, sink):
                    with suppress(OSError):
                        one.shutdown(socket.SHUT_RDWR)
                source.close()

        accepting = threading.Thread(target=serve)
        accepting.start()
        try:
            yield server.getsockname()
        finally:
            server.shutdown(socket.SHUT_RDWR)
            accepting.join()
