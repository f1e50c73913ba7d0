"""The argument `writer=` of every integration."""

from __future__ import annotations

import os

from iobench.errors import UsageError
from iobench.writers import registry
from iobench.writers.base import Writer
from iobench.writers.config import load_writer

__all__ = ["WriterChoice", "chosen_writer"]

WriterChoice = Writer | str | os.PathLike[str]
"""A Writer, a name, a name with options `odirect,block_size=8MiB`, or the path of a config."""


def chosen_writer(choice: WriterChoice) -> Writer:
    """The writer of `choice`. Raises UsageError, also for one that stores nothing, and its kin."""
    writer = _made(choice)
    if not writer.stores:
        raise UsageError(f"writer {writer.name!r} stores nothing; choose another for checkpoints")
    return writer


def _made(choice: WriterChoice) -> Writer:
    if isinstance(choice, Writer):
        return choice
    text = os.fspath(choice)
    if "," not in text or "/" in text or text.endswith(".toml"):
        return load_writer(text)
    (name, options), *more = registry.split_specs(text)
    if more:
        raise UsageError(f"writer={text!r}: names several writers, one is wanted")
    return registry.make(name, **options)
