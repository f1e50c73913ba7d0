"""Other projects' ways to save and restore a state dict, each configured as its authors advise.

Peers are entry points of the group `iobench.peers`, ours and third parties' alike. A peer's own
libraries are imported when it is first used.
"""

from __future__ import annotations

from iobench.peers.base import Peer
from iobench.writers.registry import Registry

__all__ = ["GROUP", "PREFIX", "make", "names", "peer_class"]

GROUP = "iobench.peers"
PREFIX = "peer:"
"""Comes before the name of a peer where writers are named too."""

_PEERS: Registry[Peer] = Registry(GROUP, Peer, noun="peer", prefix=PREFIX)


def names() -> list[str]:
    """Every registered peer, whether it works here or not."""
    return _PEERS.names()


def peer_class(name: str) -> type[Peer]:
    """The class of the peer `name`; imported now. Raises UnknownNameError, UnavailableError."""
    return _PEERS.find(name)


def make(name: str, /, **values: str) -> Peer:
    """A peer by name with some options set. Raises what `peer_class` raises, and OptionError."""
    cls = peer_class(name)
    return cls(cls.Options.from_mapping(values))
