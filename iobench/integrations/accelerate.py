"""Accelerate's save_state and load_state through a writer.

    from iobench.integrations.accelerate import attach

    accelerator = Accelerator()
    attach(accelerator, "writer.toml")
    accelerator.save_state("runs/step-100")
    accelerator.load_state("runs/step-100")

Accelerate calls its own hooks for the weights of the models only. It saves the optimizers, two
thirds of the bytes, without a hook. So both methods are wrapped; registered hooks run as before.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from iobench.errors import UsageError
from iobench.exports.staged_directory import StagedDirectory, shared_token
from iobench.integrations.default_writer import chosen_writer
from iobench.integrations.needs import needs
from iobench.integrations.routed import routed, staged_save
from iobench.writers.base import Writer
from iobench.writers.config import WriterLike
from iobench.writers.removal import remove_tree

with needs("accelerate", "accelerate>=1"):
    import accelerate

__all__ = ["attach", "detach"]


def attach(accelerator: accelerate.Accelerator, writer: WriterLike = "hybrid") -> None:
    """Let `accelerator.save_state` and `load_state` use `writer`, a Writer, a name or a config.

    The files are the stock ones: Accelerate reads ours, and we read those of Accelerate. A saved
    directory gets its name when all of it is durable, and replaces an old one atomically; other
    files of the old directory stay. A save that fails or is killed leaves the old directory.

    With automatic naming and a `total_limit`, the oldest directories are removed after the new one
    is complete. Saving to the working directory, or to one above it, raises UsageError.

    Raises UsageError if a writer is attached already, and the errors of choosing the writer.
    """
    if _attached(accelerator):
        raise UsageError("this Accelerator already has a writer of iobench; call detach() first")
    chosen = chosen_writer(writer)
    stock, stock_load = accelerator.save_state, accelerator.load_state

    @functools.wraps(stock)
    def save(output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        settings = accelerator.project_configuration
        if settings.automatic_checkpoint_naming:
            return _save_named(accelerator, chosen, lambda: stock(None, *args, **kwargs))
        if output_dir is None:
            return stock(output_dir, *args, **kwargs)  # raises
        staged = StagedDirectory(os.path.expanduser(output_dir), token=shared_token())
        with _staged(accelerator, chosen, staged):
            stock(str(staged.path), *args, **kwargs)
        return Path(output_dir)

    @functools.wraps(stock_load)
    def load(input_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        directory = input_dir or os.path.join(accelerator.project_dir or ".", "checkpoints")
        with routed(chosen, os.path.expanduser(directory)):
            return stock_load(input_dir, *args, **kwargs)

    accelerator.save_state, accelerator.load_state = save, load


def detach(accelerator: accelerate.Accelerator) -> None:
    """Undo `attach`."""
    if _attached(accelerator):
        del accelerator.save_state, accelerator.load_state


def _attached(accelerator: accelerate.Accelerator) -> bool:
    return "save_state" in vars(accelerator)


def _save_named(accelerator: Any, writer: Writer, stock: Callable[[], Any]) -> Path:
    """Save `project_dir/checkpoints/checkpoint_N`, staged outside of `checkpoints`.

    load_state takes the newest directory in `checkpoints`: it must not see an incomplete one.
    """
    settings = accelerator.project_configuration
    project = Path(accelerator.project_dir)
    checkpoints = project / "checkpoints"
    final = checkpoints / f"checkpoint_{accelerator.save_iteration}"
    if final.exists():
        raise ValueError(f"{final} exists; set save_iteration to the first unused number")
    staged = StagedDirectory(final, hidden=project / ".checkpoints", token=shared_token())
    staged.path = staged.root / "checkpoints" / final.name
    with _staged(accelerator, writer, staged):
        before, settings.project_dir = settings.project_dir, str(staged.root)
        try:
            stock()
        finally:
            settings.project_dir = before
    if _publishes(accelerator) and settings.total_limit is not None:
        named = checkpoints.glob("checkpoint_*")
        found = sorted((int(one.name[11:]), one) for one in named if one.name[11:].isdigit())
        for _, path in found[: -settings.total_limit]:
            remove_tree(path)
    accelerator.wait_for_everyone()
    return final


def _staged(
    accelerator: Any, writer: Writer, staged: StagedDirectory
) -> AbstractContextManager[None]:
    publishes = _publishes(accelerator)
    return staged_save(accelerator, writer, staged, publishes=publishes, keep_others=True)


def _publishes(accelerator: Any) -> bool:
    """Whether this process publishes the directory: one process per file system does."""
    if accelerator.project_configuration.save_on_each_node:
        return bool(accelerator.is_local_main_process)
    return bool(accelerator.is_main_process)
