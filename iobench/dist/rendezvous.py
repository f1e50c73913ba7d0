"""How the ranks of a job find the hub: through torchrun's store, a directory, or a known address.

The first of these that applies is used:

- `IOBENCH_STORE=tcp://HOST:PORT`: rank 0 listens there
- `IOBENCH_STORE=DIRECTORY`: rank 0 writes its address to a file in this directory, which all nodes
  share
- torchrun's own store, at MASTER_ADDR:MASTER_PORT
- a port computed from the job's name, on MASTER_ADDR, on the first host of Slurm's list, or on the
  loopback if all ranks are on this node
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from iobench.dist.interface import Interface, chosen_interface
from iobench.dist.world import World
from iobench.errors import RankError, UsageError, transfer_errors

__all__ = ["Meeting", "meet"]

_VARIABLE, _TOKEN = "IOBENCH_STORE", "IOBENCH_TOKEN"
_FIRST_PORT, _PORTS = 20000, 12000  # below Linux's ephemeral ports, which begin at 32768
_LOOK_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where the hub of a job is, and what proves that a process belongs to it.

    `server` is the listening socket in rank 0; None in the others. `again` returns the meeting that
    is told now; None where the address cannot change. `withdraw` is called when all ranks are
    there.
    """

    address: tuple[str, int]
    token: str
    interface: Interface
    server: socket.socket | None = None
    again: Callable[[], Meeting] | None = None
    withdraw: Callable[[], None] = lambda: None


def meet(world: World, *, deadline_s: float, environ: Mapping[str, str] | None = None) -> Meeting:
    """Return where the ranks of `world` meet. Rank 0 listens on return.

    Raises RankError when rank 0 does not tell its address within `deadline_s`, UsageError when
    nothing says where it is, and TransferError.
    """
    found = os.environ if environ is None else environ
    wanted, token = found.get(_VARIABLE, ""), found.get(_TOKEN)
    if wanted.startswith("tcp://"):
        return _fixed(world, wanted, token or _token_of(world), found)
    if wanted:
        told = _Directory(Path(wanted) / f"iobench-{_token_of(world)[:16]}.address")
        return _told(world, told, token, deadline_s, found)
    if world.launcher == "torchrun" and found.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = _TorchrunStore(world, found, deadline_s)
        return _told(world, store, token, deadline_s, found)
    return _computed(world, token or _token_of(world), found)


def _fixed(world: World, wanted: str, token: str, found: Mapping[str, str]) -> Meeting:
    host, _, port = wanted.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdecimal():
        raise UsageError(f"{_VARIABLE}={wanted!r}: must be tcp://HOST:PORT or a directory")
    interface = chosen_interface(host, found)
    server = _listen(host, int(port)) if world.rank == 0 else None
    return Meeting(address=(host, int(port)), token=token, interface=interface, server=server)


def _computed(world: World, token: str, found: Mapping[str, str]) -> Meeting:
    """Return a meeting at a port that every rank computes."""
    master = world.master if world.nodes > 1 else None
    if master is None and world.nodes > 1:
        raise UsageError(
            f"{world}: nothing says where rank 0 is; set MASTER_ADDR to its host, or {_VARIABLE} "
            "to a directory that all nodes share"
        )
    interface = chosen_interface(master, found)
    port = _FIRST_PORT + int(_token_of(world)[:8], 16) % _PORTS
    host = master or interface.address
    server = _listen(host, port) if world.rank == 0 else None
    return Meeting(address=(host, port), token=token, interface=interface, server=server)


def _told(
    world: World,
    told: _Directory | _TorchrunStore,
    token: str | None,
    deadline_s: float,
    found: Mapping[str, str],
) -> Meeting:
    """Return a meeting whose address rank 0 publishes. The token is random unless it is given."""
    interface = chosen_interface(world.master if world.nodes > 1 else None, found)
    if world.rank == 0:
        server = _listen(interface.address, 0)
        port: int = server.getsockname()[1]
        token = token or secrets.token_hex(16)
        address = {"host": interface.address, "port": port, "token": token}
        told.publish(address)
        return Meeting(
            address=(interface.address, port),
            token=token,
            interface=interface,
            server=server,
            withdraw=lambda: told.withdraw(address),
        )

    def read() -> Meeting:
        address = told.read(deadline_s)
        if address is None:
            raise RankError(
                f"rank 0 did not tell its address within {deadline_s:g} s, {world} waited for it",
                ranks=[0],
            )
        return Meeting(
            address=(str(address["host"]), int(address["port"])),
            token=token or str(address["token"]),
            interface=interface,
            again=read,
        )

    return read()


class _Directory:
    """The address in a file. A start that was killed may have left one: it is replaced, and ranks
    that have read it read again."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def publish(self, address: dict[str, Any]) -> None:
        new = self._file.with_name(f".{self._file.name}.{secrets.token_hex(4)}")
        with transfer_errors("writing", self._file):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            new.touch(mode=0o600)  # the token in it is for this user only
            new.write_text(json.dumps(address))
            new.rename(self._file)

    def withdraw(self, address: dict[str, Any]) -> None:
        """Remove the file, unless another job with the same name has replaced it."""
        with transfer_errors("removing", self._file), contextlib.suppress(FileNotFoundError):
            if json.loads(self._file.read_text()) == address:
                self._file.unlink()

    def read(self, deadline_s: float) -> dict[str, Any] | None:
        until_s = time.monotonic() + deadline_s
        while time.monotonic() < until_s:
            with transfer_errors("reading", self._file):
                try:
                    address: dict[str, Any] = json.loads(self._file.read_text())
                except FileNotFoundError:
                    time.sleep(_LOOK_S)
                    continue
            return address
        return None


class _TorchrunStore:
    """The address in the store of torchrun's agent, which lives as long as the job."""

    def __init__(self, world: World, found: Mapping[str, str], deadline_s: float) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its __all__

        host, port = found["MASTER_ADDR"], int(found["MASTER_PORT"])
        try:
            self._store = TCPStore(
                host, port, None, False, timedelta(seconds=deadline_s), wait_for_workers=False
            )
        except RuntimeError as error:
            raise RankError(f"{world}: torchrun's store at {host}:{port}: {error}") from error
        self._key = f"iobench/{world.job}/hub"

    def publish(self, address: dict[str, Any]) -> None:
        self._store.set(self._key, json.dumps(address))

    def withdraw(self, address: dict[str, Any]) -> None:
        """Keep the key: the store ends with the job."""

    def read(self, deadline_s: float) -> dict[str, Any] | None:
        until_s = time.monotonic() + deadline_s
        while time.monotonic() < until_s:  # not `wait`: it prints a C++ trace when it times out
            if self._store.check([self._key]):
                address: dict[str, Any] = json.loads(self._store.get(self._key))
                return address
            time.sleep(_LOOK_S)
        return None


def _listen(host: str, port: int) -> socket.socket:
    server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((host, port))
    except OSError as error:
        server.close()
        raise UsageError(
            f"rank 0 cannot listen on {host}:{port} ({error.strerror or error}); set {_VARIABLE} "
            "to tcp://HOST:PORT of rank 0, or to a directory that all nodes share"
        ) from error
    return server


def _token_of(world: World) -> str:
    """Return a text that is the same in all ranks of the job. It is no secret: IOBENCH_TOKEN is."""
    return hashlib.sha256(f"{world.job}:{os.getuid()}".encode()).hexdigest()
