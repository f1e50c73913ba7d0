"""How the ranks of a job find the hub, and the secret that proves that they belong to the job.

The first of these that applies is used:

- `IOBENCH_STORE=tcp://HOST:PORT`: rank 0 listens there; IOBENCH_TOKEN is the secret
- `IOBENCH_STORE=DIRECTORY`: rank 0 writes its address and a random secret to a file in this
  directory, which all nodes share
- torchrun's own store, at MASTER_ADDR:MASTER_PORT, which gets both
- the store of the trainer's process groups, if they are initialized
- a file in the user's own directory of this node, if all ranks are on it
- a file in the directory of the checkpoints, which all ranks share

The secret is random, or IOBENCH_TOKEN. It is never computed from what others may know, such as the
number of the job.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from iobench.errors import RankError, UsageError, transfer_errors
from iobench.ranks import calls
from iobench.ranks.wire import Wire, introduce
from iobench.ranks.world import OWN, World, is_loopback

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_SIOCGIFADDR = 0x8915  # linux/sockios.h


@dataclass(frozen=True)
class Interface:
    """The name of an interface and its IPv4 address; `why` tells how it was found."""

    name: str
    address: str
    why: str

    def __str__(self) -> str:
        return f"{self.name} ({self.address}, {self.why})"


def chosen_interface(world: World, environ: Mapping[str, str] | None = None) -> Interface:
    """Return the interface that GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names.

    Without them it is the loopback if all ranks are on this node, else the one with the route to
    the launcher's master. Both variables hold a list of names. NCCL takes each as the beginning of
    a name, as a whole name after `=`, and excludes after `^`. Raises UsageError when none matches,
    and when other nodes cannot reach the one that was found.
    """
    found = os.environ if environ is None else environ
    for variable in _VARIABLES:
        if wanted := found.get(variable):
            return _reachable(world, _named(variable, wanted))
    if world.on_one_node:
        return Interface("lo", "127.0.0.1", "all ranks are on this node")
    if world.master is None:
        return _reachable(world, Interface("lo", "127.0.0.1", "no MASTER_ADDR"))
    address = _route_to(world.master)
    name = next((name for name, own in _addresses().items() if own == address), "?")
    return _reachable(world, Interface(name, address, f"the route to {world.master}"))


def _reachable(world: World, interface: Interface) -> Interface:
    """Return an interface that other nodes can reach, if the world has some.

    On the master itself the route to the master is the loopback where /etc/hosts has its name at
    127.0.1.1, like Debian's. The only other interface is meant then.
    """
    if world.on_one_node or not is_loopback(interface.address):
        return interface
    others = {name: one for name, one in _addresses().items() if not is_loopback(one)}
    if len(others) == 1:
        ((name, address),) = others.items()
        return Interface(name, address, "the only one besides the loopback")
    shown = ", ".join(f"{name} ({one})" for name, one in others.items()) or "none but the loopback"
    raise UsageError(
        f"{world}: other nodes cannot reach {interface}; set GLOO_SOCKET_IFNAME to the interface "
        f"between the nodes (there are: {shown})"
    )


def _named(variable: str, wanted: str) -> Interface:
    whole, excluded = wanted.startswith("="), wanted.startswith("^")
    names = [name.strip() for name in wanted.lstrip("=^").split(",")]
    whole = whole or variable == "GLOO_SOCKET_IFNAME"
    addresses = _addresses()

    def matches(name: str) -> bool:
        return name in names if whole else any(name.startswith(one) for one in names)

    for name, address in addresses.items():
        if matches(name) != excluded and not (excluded and name == "lo"):
            return Interface(name, address, variable)
    raise UsageError(
        f"{variable}={wanted!r}: no such interface with an IPv4 address; "
        f"there are {', '.join(addresses)}"
    )


def _addresses() -> dict[str, str]:
    """Return the IPv4 address of each interface that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
            except OSError:  # it has none
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def _route_to(host: str) -> str:
    """Return the own address of the route to `host`. Nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            address: str = probe.getsockname()[0]
            return address
    except OSError as error:
        raise UsageError(f"there is no route to the master {host!r}: {error}") from error


_VARIABLE, _TOKEN = "IOBENCH_STORE", "IOBENCH_TOKEN"
_ROOM = 4096  # connections that wait for the hub; the kernel cuts it to net.core.somaxconn
_LOOK_S = 0.05
_GREETING_S = 5.0
_MOST_BYTES = 4096  # of a file with an address


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where the hub of a job is, and what proves that a process belongs to it.

    `server` is the listening socket in rank 0; None in the others. `again` returns the meeting that
    is published now; None where the address cannot change. `withdraw` is called when all ranks are
    there.
    """

    address: tuple[str, int]
    token: str
    interface: Interface
    server: socket.socket | None = None
    again: Callable[[], Meeting] | None = None
    withdraw: Callable[[], None] = lambda: None


def meet(
    world: World,
    *,
    deadline_s: float,
    directory: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Meeting:
    """Return where the ranks of `world` meet. Rank 0 listens on return.

    `directory`: one that all ranks have for their data. Raises RankError when rank 0 does not
    publish its address within `deadline_s`, UsageError when the ranks have nothing in common that
    has a secret, and TransferError.
    """
    found = os.environ if environ is None else environ
    if world.launcher == OWN:  # variables and process groups are those of other ranks
        return _told(world, _Directory(world, runtime_directory()), None, deadline_s, {})
    wanted, token = found.get(_VARIABLE, ""), found.get(_TOKEN)
    if wanted.startswith("tcp://"):
        return _fixed(world, wanted, token, found)
    store: _Directory | _Store | None = None
    if wanted:
        store = _Directory(world, Path(wanted))
    elif world.launcher == "torchrun" and found.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = _Store(world, _store_of_agent(world, found, deadline_s))
    elif trainers := _store_of_trainer():  # only this job has it, whatever its launcher calls it
        store = _Store(world, trainers)
    elif world.on_one_node:
        store = _Directory(world, runtime_directory())
    elif directory is not None:
        store = _Directory(world, directory)
    if store is None:
        raise UsageError(
            f"{world}: the ranks have no place in common; set {_VARIABLE} to a directory that all "
            f"nodes share, or to tcp://HOST:PORT of rank 0, with {_TOKEN}; or call "
            "torch.distributed.init_process_group before"
        )
    return _told(world, store, token, deadline_s, found)


def _fixed(world: World, wanted: str, token: str | None, found: Mapping[str, str]) -> Meeting:
    host, _, port = wanted.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdecimal():
        raise UsageError(f"{_VARIABLE}={wanted!r}: must be tcp://HOST:PORT or a directory")
    if not token:
        raise UsageError(
            f"{_VARIABLE}={wanted}: needs {_TOKEN}, a random text that is the same in all ranks"
        )
    world = replace(world, master=host)
    interface = chosen_interface(world, found)
    if world.rank == 0 and not world.on_one_node and is_loopback(_route_to(host)):
        host = interface.address  # the host's own name is at 127.0.1.1 in Debian's /etc/hosts
    server = _listen(host, int(port)) if world.rank == 0 else None
    return Meeting(address=(host, int(port)), token=token, interface=interface, server=server)


def _told(
    world: World,
    store: _Directory | _Store,
    token: str | None,
    deadline_s: float,
    found: Mapping[str, str],
) -> Meeting:
    """Return a meeting whose address rank 0 publishes. The token is random unless it is given."""
    interface = chosen_interface(world, found)
    if world.rank == 0:
        server = _listen(interface.address, 0)
        port: int = server.getsockname()[1]
        secret = "" if token else secrets.token_hex(16)
        address = {"host": interface.address, "port": port, "token": secret}
        try:
            store.publish(address, token or secret)
        except BaseException:
            server.close()
            raise
        return Meeting(
            address=(interface.address, port),
            token=token or secret,
            interface=interface,
            server=server,
            withdraw=lambda: store.withdraw(address),
        )

    until_s = time.monotonic() + deadline_s

    def read() -> Meeting:
        while (address := store.read(secret=token is None)) is None:
            if time.monotonic() > until_s:
                raise RankError(
                    f"rank 0 did not publish its address in {store} within {deadline_s:g} s, "
                    f"{world} waited for it; {store.remedy}",
                    ranks=[0],
                )
            time.sleep(_LOOK_S)
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

    remedy = (
        f"all nodes must see the same directory there, or {_VARIABLE} names one that they share; "
        "rank 0 must construct the Checkpointer too"
    )

    def __init__(self, world: World, directory: Path) -> None:
        name = hashlib.sha256(f"{world.job}:{os.getuid()}".encode())  # the same in all ranks
        self._file = directory / f".iobench-{name.hexdigest()[:16]}.address"

    def __str__(self) -> str:
        return str(self._file)

    def publish(self, address: dict[str, Any], token: str) -> None:
        self._check_free(token)
        new = self._file.with_name(f"{self._file.name}.{secrets.token_hex(4)}")
        with transfer_errors("writing", self._file):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(new, flags, 0o600), "w", encoding="ascii") as file:
                json.dump(address, file)
            new.rename(self._file)

    def _check_free(self, token: str) -> None:
        """Raise UsageError if the rank 0 of another job of the same name waits for its ranks.

        MPICH, for one, gives a job no name. After a start that was killed, another program may
        listen at the port now: it does not know the secret of the file.
        """
        address = self.read(secret=False)
        if address is None:
            return
        with contextlib.suppress(OSError):
            where = str(address["host"]), int(address["port"])
            connection = socket.create_connection(where, timeout=_GREETING_S)
            with Wire(connection, "rank 0", _GREETING_S) as wire:
                introduce(wire, (address["token"] or token).encode(), calls.PURPOSE, rank=-1)
            raise UsageError(
                f"{self._file}: another job of this name begins now; set {_VARIABLE} to another "
                "directory"
            )

    def withdraw(self, address: dict[str, Any]) -> None:
        """Remove the file, unless another job with the same name has replaced it."""
        with transfer_errors("removing", self._file), contextlib.suppress(FileNotFoundError):
            if self.read(secret=False) == address:
                self._file.unlink()

    def read(self, *, secret: bool) -> dict[str, Any] | None:
        """Return the address; None without one.

        The file of another user is refused: with a `secret` of his own he would be the hub.
        """
        with transfer_errors("reading", self._file):
            try:
                fd = os.open(self._file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
            with open(fd, "rb") as file:
                status, text = os.fstat(fd), file.read(_MOST_BYTES)
        if secret and (status.st_uid != os.geteuid() or status.st_mode & 0o077):
            raise UsageError(
                f"{self._file}: has mode {stat.S_IMODE(status.st_mode):03o} and belongs to user "
                f"{status.st_uid}; it must be 600 and of user {os.geteuid()}, who runs the ranks. "
                f"Remove it, or set {_VARIABLE} to a directory of this user, or {_TOKEN}"
            )
        try:
            address: dict[str, Any] = json.loads(text)
        except ValueError:
            raise UsageError(f"{self._file}: is not the address of a rank 0; remove it") from None
        return address


class _Store:
    """The address in a store of torch: that of torchrun's agent, or that of the trainer's groups.

    Whoever reaches the store on the network may read it.
    """

    remedy = "rank 0 must construct the Checkpointer too"

    def __init__(self, world: World, store: Store) -> None:
        self._store, self._key = store, f"iobench/{world.job}/hub"

    def __str__(self) -> str:
        return "the store of torch.distributed"

    def publish(self, address: dict[str, Any], token: str) -> None:
        del token
        self._store.set(self._key, json.dumps(address))

    def withdraw(self, address: dict[str, Any]) -> None:
        del address
        with contextlib.suppress(RuntimeError):  # the process that serves it has ended
            self._store.delete_key(self._key)  # the ranks may connect again

    def read(self, *, secret: bool) -> dict[str, Any] | None:
        del secret  # every store has it
        if not self._store.check([self._key]):  # not `wait`: it prints a C++ trace at its end
            return None
        address: dict[str, Any] = json.loads(self._store.get(self._key))
        return address


def _store_of_agent(world: World, found: Mapping[str, str], deadline_s: float) -> Store:
    """Return the store of torchrun's agent, which lives as long as the job."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its __all__

    host, port = found["MASTER_ADDR"], int(found["MASTER_PORT"])
    try:
        return TCPStore(
            host, port, None, False, timedelta(seconds=deadline_s), wait_for_workers=False
        )
    except RuntimeError as error:
        raise RankError(f"{world}: torchrun's store at {host}:{port}: {error}") from error


def _store_of_trainer() -> Store | None:
    """Return the store at which the trainer's process groups have met; None without groups."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        return None
    store: Store | None = distributed.distributed_c10d._get_default_store()
    return store


def _listen(host: str, port: int) -> socket.socket:
    server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((host, port))
        server.listen(_ROOM)  # here: two sockets may be bound to one port, and one listens
    except OSError as error:
        server.close()
        raise UsageError(
            f"rank 0 cannot listen on {host}:{port} ({error.strerror or error}); set {_VARIABLE} "
            "to tcp://HOST:PORT of rank 0, or to a directory that all nodes share"
        ) from error
    return server


def runtime_directory() -> Path:
    """Return the runtime directory of this user; create it, for this user only.

    It has the addresses of jobs without a shared directory, and replicas. It is in /dev/shm, so a
    reboot removes both. IOBENCH_RUNTIME names another one.

    Raises UsageError when it belongs to another user or others may use it.
    """
    path = runtime_path()
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UsageError(
            f"{path}: must be a directory of user {os.getuid()} with mode 0700; remove it, or name "
            "another one in IOBENCH_RUNTIME"
        )
    return path


def runtime_path() -> Path:
    """Return its path; it may not exist."""
    return Path(os.environ.get("IOBENCH_RUNTIME") or f"/dev/shm/iobench-{os.getuid()}")
