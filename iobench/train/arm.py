"""Arm: one way to take checkpoints while training: a writer or a peer, in one mode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from iobench import peers
from iobench.errors import UsageError
from iobench.peers import PREFIX
from iobench.peers.base import Peer
from iobench.results.records import how_saved
from iobench.units import parse_size
from iobench.writers import registry
from iobench.writers.base import Writer

Mode = Literal["none", "sync", "async", "lazy", "memory", "spill"]

SLOWER_MEMORY = 2
"""Size of the slower memory of mode `spill`, in sizes of its DRAM."""

_BACKGROUND = ("async", "lazy", "memory", "spill")
_MODES = ("none", "sync", *_BACKGROUND)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """How checkpoints are taken. `by` is None for mode `none`, which takes no checkpoints.

    `slots` is the number of snapshots in host memory, None for a mode or a peer without slots. In
    mode `memory` every snapshot is written; `spill` has slower memory for twice as many more.
    `budget_bytes` limits the memory of modes `async` and `lazy`.
    """

    mode: Mode
    by: Writer | Peer | None = None
    slots: int | None = None
    budget_bytes: int | None = None

    @property
    def writer(self) -> str:
        """The name of the writer or peer; empty for none."""
        if self.by is None:
            return ""
        return f"{PREFIX}{self.by.name}" if isinstance(self.by, Peer) else self.by.name

    @property
    def options(self) -> Mapping[str, Any]:
        return {} if self.by is None else self.by.options.to_dict()

    @property
    def label(self) -> str:
        """As in `hybrid async=2`, `hybrid lazy=2 budget=1GiB`, `peer:torch-save sync` or `none`."""
        options = [] if self.by is None else self.by.options.changed()
        how = how_saved(self.mode, self.slots, self.budget_bytes)
        return f"{','.join([self.writer, *options])} {how}".strip()

    @property
    def background(self) -> bool:
        """Whether checkpoints become durable while training goes on."""
        return self.mode in _BACKGROUND

    @property
    def keeps_all(self) -> bool:
        """Whether every checkpoint is written and stays on storage."""
        return self.mode in ("memory", "spill")

    def memory_bytes(self, size_bytes: int) -> int:
        """Return the most host memory that its copies of checkpoints of `size_bytes` take."""
        background = isinstance(self.by, Peer) and self.mode == "async"
        more = (self.slots or 0) * SLOWER_MEMORY if self.mode == "spill" else 0
        needed = ((self.slots or int(background)) + more) * size_bytes
        return needed if self.budget_bytes is None else min(needed, self.budget_bytes)


NONE = Arm(mode="none")


def choose_arms(
    writers: str, modes: str, budgets: str | None = None
) -> tuple[list[Arm], list[str]]:
    """Return the arms of `hybrid,peer:torch-save` in `none,sync,async=2`, and those left out.

    `none` is first. Background modes have 2 slots where no number is given. Of these a peer has
    only `async`: `peer:torch-save` copies the state to new memory, and a thread calls torch.save;
    `peer:dcp` is dcp.async_save. With `budgets`, like `1GiB,2GiB`, there
    is an arm for each of them. Raises UsageError and its subclasses.
    """
    limits = [parse_size(one, "--budget") for one in budgets.split(",")] if budgets else [None]
    wanted = [_mode(text.strip()) for text in modes.split(",")]
    if all(mode == "none" for mode, _ in wanted):
        raise UsageError(f"--mode {modes}: saves nothing; add sync, async or lazy")
    arms, left_out = [NONE], []
    for by in _savers(writers):
        for mode, slots in wanted:
            if mode == "none":
                continue
            if isinstance(by, Peer):
                if mode not in ("sync", "async"):
                    left_out.append(f"{PREFIX}{by.name} has no {mode} mode")
                    continue
                slots = None
            limited = isinstance(by, Writer) and mode in ("async", "lazy")
            for limit in limits if limited else [None]:
                arm = Arm(mode=mode, by=by, slots=slots, budget_bytes=limit)
                if arm.label not in [one.label for one in arms]:
                    arms.append(arm)
    return arms, left_out


def arm_of(side: str) -> Arm:
    """Return the arm of `hybrid lazy=1`, or `none`. Raises UsageError and its subclasses."""
    writer, _, mode = side.rpartition(" ")
    return choose_arms(writer, mode)[0][-1] if writer else NONE


def _savers(writers: str) -> Iterator[Writer | Peer]:
    for name, values in registry.split_specs(writers):
        if not name.startswith(PREFIX):
            yield registry.make(name, **values)
            continue
        peer = peers.make(name.removeprefix(PREFIX), **values)
        if not peer.trains:
            raise UsageError(
                f"{name} cannot save a training state; peer:torch-save and peer:dcp can"
            )
        yield peer


def _mode(text: str) -> tuple[Mode, int | None]:
    name, equals, number = text.partition("=")
    background = name in _BACKGROUND
    if name not in _MODES or (equals and not (background and number.isdecimal() and int(number))):
        raise UsageError(
            f"--mode {text!r}: choose {', '.join(_MODES[:-1])} or {_MODES[-1]}; async=1: one slot"
        )
    return cast(Mode, name), (int(number) if equals else 2) if background else None
