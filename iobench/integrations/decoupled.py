"""What DeepSpeed writes in the background, made durable where it would be too late afterwards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["commit_decoupled"]


def commit_decoupled(models: Iterable[Any]) -> None:
    """Have the DeepSpeed engines among `models` commit now what they wait with until the next step.

    To be called by all ranks, before a directory that was saved to gets another name. Raises what
    failed.
    """
    for model in models:
        if (
            hasattr(model, "_commit_decoupled_checkpoint")
            and model.checkpoint_engine.is_decoupled()
        ):
            model._commit_decoupled_checkpoint()
