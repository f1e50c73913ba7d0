"""iobench.Checkpointer as a class: its parameters, its errors, and subclasses."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import iobench


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
