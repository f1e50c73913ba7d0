"""The network interface of this node: the one that the user names, or the one to the master."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from iobench.errors import UsageError
from iobench.ranks.world import World, is_loopback

__all__ = ["Interface", "chosen_interface"]

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
