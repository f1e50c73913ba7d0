"""Optimizer state on storage: streaming AdamW and Adam, and every step as a checkpoint.

from iobench.offload import AdamW

optimizer = AdamW(model.parameters(), "/mnt/nvme/state", lr=3e-4, memory="2GiB")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from iobench.offload.algorithms import Adam, AdamW

__all__ = ["Adam", "AdamW"]

_HOMES = {
    "Adam": "iobench.offload.algorithms",
    "AdamW": "iobench.offload.algorithms",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'iobench.offload' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
