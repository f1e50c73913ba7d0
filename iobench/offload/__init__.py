"""Optimizer state on storage: streaming AdamW and Adam, and every step as a checkpoint.

from iobench.offload import AdamW

optimizer = AdamW(model.parameters(), "/mnt/nvme/state", lr=3e-4, memory="2GiB")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from iobench.offload.optimizer import Adam, AdamW

__all__ = ["Adam", "AdamW"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'iobench.offload' has no attribute {name!r}")
    from iobench.offload import optimizer

    return getattr(optimizer, name)
