"""The restore loop: the copies of a candidate are tried, nearest first, in all ranks alike."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from iobench import Checkpointer
from iobench.checkpoint.manifest import Manifest
from iobench.checkpoint.restore import Candidates, restore
from iobench.checkpoint.store import DirectoryStore
from iobench.checkpoint.stored import paths_elsewhere
from iobench.errors import DataMismatchError, IobenchError, TransferError
from iobench.ranks.control import Control
from iobench.ranks.world import World
from iobench.writers.base import CopyReader
from iobench.writers.buffered import BufferedWriter


class _Copies(Candidates):
    """The checkpoints of several directories that are copies of each other."""

    def __init__(self, first: Path, *others: Path, errors: tuple[Exception | None, ...]) -> None:
        super().__init__(DirectoryStore(first), BufferedWriter())
        self._others, self._errors = list(others), list(errors)

    def reader(self, step: int, manifest: Manifest) -> CopyReader:
        error = self._errors.pop(0)
        if error is not None:
            raise error
        return super().reader(step, manifest)

    def next_copy(self, step: int, problem: str) -> bool:
        assert problem
        if not self._others:
            return False
        self._checkpoints = DirectoryStore(self._others.pop(0))
        return True

    def sources(self, step: int) -> dict[str, str]:
        return {str(self.locate(step).parent): "read"}  # type: ignore[union-attr]  # directories


@pytest.fixture
def copies(tmp_path: Path) -> Callable[..., _Copies]:
    """Returns the candidates of two directories; their reads of step 2 raise `errors`."""
    near, far = tmp_path / "near", tmp_path / "far"
    with Checkpointer(near) as ckpt:
        for step in (1, 2):
            ckpt.save({"w": torch.full((9,), float(step))}, step)
    shutil.copytree(near, far)
    return lambda *errors: _Copies(near, far, errors=(*errors, None))


_DAMAGED, _LOST = DataMismatchError("bits"), TransferError(errno.ECONNRESET, "lost")


@pytest.mark.parametrize("error", [_DAMAGED, _LOST])
def test_the_next_copy_is_read(copies: Any, tmp_path: Path, error: IobenchError) -> None:
    """Whatever is wrong with the nearest one."""
    state, loaded = restore(copies(error), "latest")
    assert state["w"].unique().tolist() == [2]
    assert loaded.sources == {str(tmp_path / "far"): "read"}
    assert loaded.passed_over == {}


def test_no_copy_can_be_read(copies: Any) -> None:
    """The error of the nearest one names that of the other one, and the checkpoint before it."""
    with pytest.raises(DataMismatchError, match="bits") as caught:
        restore(copies(DataMismatchError("bits"), _LOST), "latest")
    copy, before = caught.value.__notes__
    assert "far/step-2" in copy
    assert "lost" in copy
    assert "step 1" in before


def test_only_damage_is_passed_over(copies: Any) -> None:
    """A lost network is an error: the checkpoint may be whole."""
    with pytest.warns(RuntimeWarning, match="step 2 is skipped: bits"):
        _, loaded = restore(
            copies(DataMismatchError("bits"), DataMismatchError("more")),
            "latest",
            on_corrupt="previous",
        )
    assert (loaded.step, loaded.passed_over) == (1, {2: "bits"})
    with pytest.raises(TransferError, match="lost"):
        restore(copies(_LOST, DataMismatchError("more")), "latest", on_corrupt="previous")


def test_a_rank_that_compares_nothing_gets_all_tensors() -> None:
    """Also those that only the `like` of another rank has."""

    class _Ranks:
        world = World.single()

        def distinct(self, phase: str, own: Callable[[], list[Any]]) -> list[list[Any]]:
            assert phase
            return [own(), [["v"], ["w"]]]

    ranks = cast(Control, _Ranks())
    assert paths_elsewhere(ranks, {"w": torch.ones(2)}) == {("v",)}
    assert not paths_elsewhere(ranks, None)
