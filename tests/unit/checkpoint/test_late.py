"""Saves that compare the tensors with those of the last save while they are written."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from iobench import Checkpointer, KeepLast
from iobench.checkpoint.serialized import Serializer
from iobench.errors import StateError
from iobench.formats import late_image
from iobench.formats import safetensors as our_safetensors
from iobench.formats.late_image import LateImage, LayoutChangedError
from iobench.writers.base import Writer
from iobench.writers.registry import make

State = dict[str, Any]
_COUNT = 200


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tensor is enough, and a range is not made longer."""
    monkeypatch.setattr(late_image, "_FEWEST", 1)
    monkeypatch.setattr(late_image, "_TOGETHER", 1)


@pytest.fixture(params=["hybrid", "odirect", "uring"])
def writer(request: pytest.FixtureRequest, tmp_path: Path) -> Writer:
    """A writer that copies small tensors to many blocks."""
    made = make(request.param, block_size="64KiB")
    if not made.available(tmp_path).ok:
        pytest.skip(f"{request.param} is not available here")
    return made


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The first tensor of each range in which a tensor of another layout was found."""
    found: list[int] = []
    locate = LateImage._locate

    def noted(self: LateImage, first: int, last: int) -> Any:
        try:
            return locate(self, first, last)
        except LayoutChangedError:
            found.append(first)
            raise

    monkeypatch.setattr(LateImage, "_locate", noted)
    return found


def _state() -> State:
    """About 600 kB; in reverse order, as the file has its tensors sorted by name."""
    return {f"{n:03}": torch.randn(700 + n) for n in reversed(range(_COUNT))}


_CHANGES: dict[str, Callable[[State], Any]] = {
    "nothing": lambda _: None,
    "values": lambda state: [tensor.neg_() for tensor in state.values()],
    "objects": lambda state: state.update({key: t.detach() for key, t in state.items()}),
    "memory": lambda state: state.update({key: t.clone() for key, t in state.items()}),
    "first": lambda state: state.update({"000": torch.randn(3, 4)}),
    "last": lambda state: state.update({"199": torch.randn(5)}),
    "dtype": lambda state: state.update({"150": torch.randn(850).to(torch.float64)}),
    "strides": lambda state: state.update({"150": torch.randn(1700)[::2]}),
    "empty": lambda state: state.update({"150": torch.empty(0)}),
    "negation": lambda state: state.update({"150": torch._neg_view(torch.randn(850))}),
    "ties": lambda state: state.update({"150": state["120"], "151": state["152"][:851]}),
    "number of tensors": lambda state: state.update({"200": torch.randn(5)}),
}


@pytest.mark.parametrize("change", _CHANGES)
def test_checkpoints(
    writer: Writer, tmp_path: Path, expect_same: Callable[..., None], change: str
) -> None:
    """A state that differs in any way from the last one is saved as it is, and so is the next."""
    state = _state()
    with Checkpointer(tmp_path / "run", writer=writer, keep=KeepLast(2)) as ckpt:
        ckpt.save(state, 0)
        _CHANGES[change](state)
        for step in (1, 2):
            save = ckpt.save(state, step)
            expect_same(ckpt.load(), {name: t.resolve_neg() for name, t in state.items()})
            assert save.status == "committed"
            file = tmp_path / "run" / f"step-{step}" / "tensors.safetensors"
            assert save.size_bytes == file.stat().st_size
        assert ckpt.steps() == [1, 2]
    assert not list((tmp_path / "run").glob(".step*"))


@pytest.mark.parametrize("reuse_files", [False, True])
def test_a_file_half_written(
    writer: Writer,
    tmp_path: Path,
    expect_same: Callable[..., None],
    refused: list[int],
    reuse_files: bool,
) -> None:
    """The difference is found after other blocks were written. Nothing of them is left."""
    state = _state()
    run, keep = tmp_path / "run", KeepLast(1)
    with Checkpointer(run, writer=writer, keep=keep, reuse_files=reuse_files) as ckpt:
        for step in range(3):
            state["170"] = torch.randn(900 + step // 2)
            ckpt.save(state, step)
            expect_same(ckpt.load(), state)
    assert refused
    assert min(refused) > 100
    assert not list((tmp_path / "run").glob(".step*"))
    assert sorted(path.name for path in (tmp_path / "run" / "step-2").iterdir()) == [
        "manifest.json",
        "state.json",
        "tensors.safetensors",
    ]


def test_a_state_that_cannot_be_saved_any_more(writer: Writer, tmp_path: Path) -> None:
    """It is refused like a first one, and the next save of the step works."""
    state = _state()
    with Checkpointer(tmp_path / "run", writer=writer) as ckpt:
        ckpt.save(state, 0)
        for bad in (torch.ones(850).to_sparse(), torch.ones(850, device="meta")):
            with pytest.raises(StateError, match="150"):
                ckpt.save({**state, "150": bad}, 1)
        weight = torch.ones(850)
        weight.untyped_storage().resize_(8)
        with pytest.raises(StateError, match="150: its storage is smaller"):
            ckpt.save({**state, "150": weight}, 1)
        assert ckpt.steps() == [0]
        ckpt.save(state, 1)
        assert ckpt.steps() == [0, 1]
    assert not list((tmp_path / "run").glob(".step*"))


def test_safetensors_files(writer: Writer, tmp_path: Path, refused: list[int]) -> None:
    """Every file is that of the library, whatever changed since the last one."""
    state = _state()
    for change in ("nothing", "values", "last", "nothing", "dtype", "ties", "negation", "empty"):
        _CHANGES[change](state)
        our_safetensors.save(state, "ours", tmp_path, writer)
        plain = {name: tensor.resolve_neg().clone() for name, tensor in state.items()}
        assert (tmp_path / "ours").read_bytes() == safetensors.torch.save(plain)
    assert max(refused) > 100
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_ranges_in_any_order() -> None:
    """The bytes of a range are those of the file, also when others take theirs."""
    tensors = {f"{n}": torch.arange(n % 7 + 1) for n in range(30)}
    serializer = Serializer()
    serializer.serialize(tensors)
    whole = serializer.serialize(tensors).image()
    data = b"".join(view.tobytes() for view in whole.views(0, whole.size_bytes))
    edges = [0, 1, 300, 301, 1500, 2000, len(data)]
    for first, last in itertools.combinations(edges, 2):
        image = serializer.serialize(tensors, late=True).image()
        assert isinstance(image, LateImage)
        for start, stop in ((first, last), (0, len(data)), (first, last)):
            assert b"".join(v.tobytes() for v in image.views(start, stop)) == data[start:stop]
