"""saver_for: the saver of an arm, with or without tiers."""

from __future__ import annotations

from pathlib import Path

from iobench.train.arm import Arm
from iobench.train.saver import Saver, plain_saver
from iobench.writers.base import Writer

__all__ = ["saver_for"]


def saver_for(arm: Arm, directory: Path) -> Saver:
    """Return the saver of `arm`. It creates `directory` for its checkpoints."""
    if arm.tiers is None or not isinstance(arm.by, Writer):
        return plain_saver(arm, directory)
    from iobench.train.tiered_saver import TieredSaver  # here: it takes time to import

    return TieredSaver(arm, arm.tiers, arm.by, directory)
