"""iobench: a benchmark and tuner of I/O paths for LLM checkpoints, and a library of writers.

    writer = iobench.load_writer("odirect", block_size="16MiB")
    with writer.open("model.pt") as file:
        torch.save(model.state_dict(), file)

`import iobench` loads neither torch nor pandas: parts that need them are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from iobench._version import __version__

if TYPE_CHECKING:
    from iobench.checkpoint.rebuild import PerRank, SavedPerRank
    from iobench.checkpoint.restore import load_checkpoint
    from iobench.checkpoint.retention import KeepAll, KeepEvery, KeepLast
    from iobench.checkpoint.save import Save
    from iobench.checkpoint.schedule import Auto, Every
    from iobench.checkpointer.checkpointer import Checkpointer
    from iobench.exports.export import ExportReport, export
    from iobench.integrations.default_writer import set_default_writer
    from iobench.ranks.world import World
    from iobench.remote.memory import Memory
    from iobench.remote.placement import Placement
    from iobench.remote.remote import Remote
    from iobench.replicas.partner import Partner
    from iobench.verification.inventory import VerifyFinding, VerifyReport
    from iobench.verification.verify import verify
    from iobench.writers.base import Writer
    from iobench.writers.config import dump_writer, load_writer
    from iobench.writers.image import FileImage
    from iobench.writers.transfer import Transfer

__all__ = [
    "Auto",
    "Checkpointer",
    "Every",
    "ExportReport",
    "FileImage",
    "KeepAll",
    "KeepEvery",
    "KeepLast",
    "Memory",
    "Partner",
    "PerRank",
    "Placement",
    "Remote",
    "Save",
    "SavedPerRank",
    "Transfer",
    "VerifyFinding",
    "VerifyReport",
    "World",
    "Writer",
    "__version__",
    "dump_writer",
    "export",
    "load_checkpoint",
    "load_writer",
    "set_default_writer",
    "verify",
]

_HOMES = {
    "Auto": "iobench.checkpoint.schedule",
    "Checkpointer": "iobench.checkpointer.checkpointer",
    "Every": "iobench.checkpoint.schedule",
    "ExportReport": "iobench.exports.export",
    "FileImage": "iobench.writers.image",
    "KeepAll": "iobench.checkpoint.retention",
    "KeepEvery": "iobench.checkpoint.retention",
    "KeepLast": "iobench.checkpoint.retention",
    "PerRank": "iobench.checkpoint.rebuild",
    "Memory": "iobench.remote.memory",
    "Placement": "iobench.remote.placement",
    "Remote": "iobench.remote.remote",
    "Save": "iobench.checkpoint.save",
    "SavedPerRank": "iobench.checkpoint.rebuild",
    "Partner": "iobench.replicas.partner",
    "Transfer": "iobench.writers.transfer",
    "VerifyFinding": "iobench.verification.inventory",
    "VerifyReport": "iobench.verification.inventory",
    "World": "iobench.ranks.world",
    "Writer": "iobench.writers.base",
    "dump_writer": "iobench.writers.config",
    "export": "iobench.exports.export",
    "load_checkpoint": "iobench.checkpoint.restore",
    "load_writer": "iobench.writers.config",
    "set_default_writer": "iobench.integrations.default_writer",
    "verify": "iobench.verification.verify",
}
_MODULES = (
    *("errors", "formats", "integrations", "offload", "results", "safetensors"),
    *("testing", "torch", "writers"),
)
"""Modules that are imported on first access: some load a library."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"iobench.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'iobench' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES})
