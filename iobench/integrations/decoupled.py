"""Commits DeepSpeed's background saves. Used before a directory gets its final name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def commit_decoupled(models: Iterable[Any]) -> None:
    """Let the DeepSpeed engines among `models` commit their background saves now.

    Otherwise they commit before the next optimizer step. All ranks call this before the saved
    directory is renamed. Raises the error of a failed save.
    """
    for model in models:
        if (
            hasattr(model, "_commit_decoupled_checkpoint")
            and model.checkpoint_engine.is_decoupled()
        ):
            model._commit_decoupled_checkpoint()
