"""What the hub of rank 0 costs in a call of all ranks, by the number of ranks.

    python benchmarks/hub.py --ranks 256 1024

The hub is the real one, in a process of its own. One process stands for all ranks: it has a
connection for each, sends what each rank sends in a save, and reads the answers. CPU time is that
of the hub's thread, which takes the interpreter's lock of rank 0; the median of the rounds.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import resource
import socket
import statistics
import time
from multiprocessing.connection import Connection

from iobench.dist.hub import Hub
from iobench.dist.member import _greet
from iobench.dist.messages import PREFIX, json_bytes, length_of, pack

_TOKEN = "0123456789abcdef"
_LOST_AFTER_S = 600.0


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    print(f"{'ranks':>6}  {'values':10}{'CPU of the hub, ms':>20}{'answers, MB':>13}")
    for ranks in given.ranks:
        for kind in ("equal", "different"):
            cpu_s, size = _measured(ranks, kind, given.rounds)
            print(f"{ranks:6}  {kind:10}{1000 * cpu_s:20.1f}{size / 1e6:13.2f}", flush=True)


def _measured(ranks: int, kind: str, rounds: int) -> tuple[float, int]:
    """Return the CPU time of the hub in a round, and the bytes of its answers."""
    own, other = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_hub, args=(other, ranks))
    process.start()
    address = own.recv()
    connections = [_Rank(address, rank) for rank in range(ranks)]
    times, size = [], 0
    for number in range(rounds + 1):
        own.send("time")
        before_s = own.recv()
        for rank, one in enumerate(connections):
            one.put(number, _told(rank if kind == "different" else 0))
        size = sum(one.answer() for one in connections)
        own.send("time")
        times.append(own.recv() - before_s)
    own.send("end")
    process.join()
    for one in connections:
        one.connection.close()
    return statistics.median(times[1:]), size


def _told(rank: int) -> dict[str, object]:
    """Return what a rank sends in each save: hashes of its structure."""
    key = hashlib.sha256(str(rank).encode()).hexdigest()[:32]
    return {"key": key, "digest": "0" * 32, "plain": "1" * 32, "failed": []}


class _Rank:
    """A connection of a rank."""

    def __init__(self, address: tuple[str, int], rank: int) -> None:
        self.connection = socket.create_connection(address)
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _greet(self.connection, rank, _TOKEN, "here", 60)

    def put(self, number: int, value: object) -> None:
        """Send the value of an all-gather."""
        head = {"type": "put", "sub": "", "number": number, "kind": "all-gather", "phase": "save"}
        rest = {"aside": False, "error": None, "deadline_s": 600, "acknowledged": False}
        self.connection.sendall(pack({**head, **rest}, json_bytes(value)))

    def answer(self) -> int:
        """Read the answer; return its bytes."""
        length = length_of(self._bytes(PREFIX.size))
        self._bytes(length)
        return PREFIX.size + length

    def _bytes(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            data += self.connection.recv(size - len(data))
        return data


def _hub(pipe: Connection, ranks: int) -> None:
    """Serve `ranks`, and return the CPU time of the hub's thread when asked."""
    server = socket.create_server(("127.0.0.1", 0), backlog=ranks)
    hub = Hub(server, size=ranks, token=_TOKEN, host="here", lost_after_s=_LOST_AFTER_S)
    pipe.send(server.getsockname())
    clock = None
    while pipe.recv() == "time":
        if clock is None:
            assert hub._thread.ident is not None
            clock = time.pthread_getcpuclockid(hub._thread.ident)
        pipe.send(time.clock_gettime(clock))


if __name__ == "__main__":
    main()
