"""Peers: other projects' ways to save and restore a state dict, configured as their authors advise.

Peers are entry points of the group `iobench.peers`, both ours and those of third parties. The
libraries of a peer are imported on its first use.
"""

from __future__ import annotations

from iobench.peers.base import Peer
from iobench.writers.registry import Registry

__all__ = ["GROUP", "PREFIX", "make", "names", "peer_class"]

GROUP = "iobench.peers"
PREFIX = "peer:"
"""Precedes the name of a peer in options that also accept writers: `--writer peer:dcp`."""

_PEERS: Registry[Peer] = Registry(GROUP, Peer, noun="peer", prefix=PREFIX)


names = _PEERS.names
peer_class = _PEERS.find


def make(name: str, /, **values: str) -> Peer:
    """Make the peer `name` with options. Raises the errors of `peer_class`, and OptionError."""
    return _PEERS.make(name, values)
