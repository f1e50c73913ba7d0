"""Other projects' ways to save and restore a state dict, each configured as its authors advise.

Names and classes stand here; a peer's own libraries are imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from iobench.errors import UnknownNameError

if TYPE_CHECKING:
    from iobench.peers.base import Peer

__all__ = ["make", "names", "peer_class"]

_PEERS = {
    "boto3-upload-file": "boto3_upload_file:Boto3UploadFile",
    "dcp": "dcp:Dcp",
    "deepspeed-aio": "deepspeed_aio:DeepspeedAio",
    "fastsafetensors": "fastsafetensors:Fastsafetensors",
    "obstore": "obstore:Obstore",
    "runai-streamer": "runai_streamer:RunaiStreamer",
    "s3torchconnector": "s3torchconnector:S3TorchConnector",
    "safetensors": "safetensors:Safetensors",
    "tensorstore": "tensorstore:Tensorstore",
    "torch-save": "torch_save:TorchSave",
    "torch-save-mmap": "torch_save_mmap:TorchSaveMmap",
}


def names() -> list[str]:
    """Every peer, whether it works here or not."""
    return sorted(_PEERS)


def peer_class(name: str) -> type[Peer]:
    """The class of the peer `name`. Raises UnknownNameError."""
    if name not in _PEERS:
        raise UnknownNameError("peer", name, _PEERS)
    module, _, cls = _PEERS[name].partition(":")
    found: type[Peer] = getattr(import_module(f"iobench.peers.{module}"), cls)
    return found


def make(name: str, /, **values: str) -> Peer:
    """A peer by name with some options set. Raises UnknownNameError, OptionError."""
    cls = peer_class(name)
    return cls(cls.Options.from_mapping(values))
