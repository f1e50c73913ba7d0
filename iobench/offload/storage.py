"""Storage: how an optimizer keeps its state, and the engine that does it."""

from __future__ import annotations

from typing import Literal, TypedDict

from iobench.errors import OptionError
from iobench.offload.engine import Engine, EngineOptions, ThreadEngine
from iobench.offload.process import ProcessEngine
from iobench.offload.store import GenerationStore

__all__ = ["EngineName", "Storage", "check_engine", "start_engine"]

EngineName = Literal["thread", "process"]


class Storage(TypedDict, total=False):
    """How an optimizer keeps its state; see OffloadedOptimizer."""

    memory: str | int
    engine: EngineName
    pins: int
    max_lag: int
    overlap: bool
    chunk_elements: int | None
    iodepth: int
    block_size: str | int
    clone_pins: bool


def check_engine(name: str) -> None:
    """Raise OptionError for an unknown kind of engine."""
    if name not in ("thread", "process"):
        raise OptionError(f"engine={name!r}: 'thread' or 'process'")


def start_engine(kind: EngineName, store: GenerationStore, options: EngineOptions) -> Engine:
    """Start an engine on `store`, which is closed if that fails."""
    if kind == "process":
        return ProcessEngine(store, options)
    return ThreadEngine(store, options)
