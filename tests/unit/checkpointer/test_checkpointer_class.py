"""iobench.Checkpointer as a class: its parameters, its errors, and subclasses."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import iobench
from iobench.checkpointer.kinds import kind_of_checkpointer
from iobench.checkpointer.ranked import RankedCheckpointer
from iobench.errors import OptionError
from iobench.ranks.world import World

_RANKS = World(
    rank=1,
    size=2,
    local_rank=1,
    local_size=2,
    node=0,
    nodes=1,
    host="a",
    job="j",
    launcher="torchrun",
)


class Logged(iobench.Checkpointer):
    """A trainer's own: with a constructor of its own, and one method around save."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(Path(name), keep=iobench.KeepLast(1), world="alone", **options)
        self.log: list[int] = []

    def save(self, state: Any, step: int) -> Any:
        self.log.append(step)
        return super().save(state, step)


def test_every_parameter_is_shown_with_its_type() -> None:
    """Editors and type checkers complete and check them; `help` describes each one."""
    shown = inspect.signature(iobench.Checkpointer)
    assert all(one.kind is not inspect.Parameter.VAR_KEYWORD for one in shown.parameters.values())
    assert {"writer", "slots", "keep", "tiers", "world", "replicate"} <= shown.parameters.keys()
    for name, one in shown.parameters.items():
        assert one.annotation is not inspect.Parameter.empty, name
        assert f"`{name}`" in (iobench.Checkpointer.__doc__ or ""), name
    assert next(iter(shown.parameters)) == "location"


def test_an_unknown_option_names_the_public_class(tmp_path: Path) -> None:
    wrong: dict[str, Any] = {"slot": 2}
    with pytest.raises(TypeError, match=r"^Checkpointer\.__init__\(\).*'slot'"):
        iobench.Checkpointer(tmp_path, **wrong)


def test_a_subclass(tmp_path: Path) -> None:
    """Its options reach the Checkpointer through its own constructor."""
    with Logged(f"{tmp_path}/a", slots=1) as ckpt:
        for step in (1, 2):
            ckpt.save({"w": torch.ones(2)}, step)
        assert (ckpt.log, ckpt.steps()) == ([1, 2], [2])
        assert type(ckpt) is Logged


def test_the_kind_of_a_subclass() -> None:
    """In a job of ranks its methods come before those of ranks. Each kind is made once."""
    made = kind_of_checkpointer(Logged, _RANKS, None)
    assert issubclass(made, Logged)
    assert issubclass(made, RankedCheckpointer)
    assert made.save is Logged.save
    assert made.wait is RankedCheckpointer.wait
    assert (made.__name__, made.__module__) == ("Logged", __name__)
    assert kind_of_checkpointer(Logged, _RANKS, None) is made
    assert kind_of_checkpointer(made, _RANKS, None) is made
    assert kind_of_checkpointer(iobench.Checkpointer, _RANKS, None) is RankedCheckpointer
    assert kind_of_checkpointer(Logged, "alone", None) is Logged


def test_slots_and_memory_tiers(tmp_path: Path) -> None:
    """The sizes of the tiers decide; only slots that were given are refused."""
    tiers = [iobench.Memory("8MiB")]
    with pytest.raises(OptionError, match="slots: the sizes of the Memory tiers decide"):
        iobench.Checkpointer(tmp_path, slots=2, tiers=tiers)
    iobench.Checkpointer(tmp_path, tiers=tiers).close()
