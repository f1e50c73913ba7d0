"""Torch files written in the background: stock's bytes, in order, and no lost failure."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from iobench.errors import OptionError, StateError, TransferError
from iobench.formats import torch_image
from iobench.integrations.background import BackgroundFiles, absolute
from iobench.writers.blocks import interpreter_end
from iobench.writers.buffered import BufferedWriter
from iobench.writers.transfer import Transfer


class Held(BufferedWriter):
    """A writer that waits before each file, and fails where the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.go, self.fails = threading.Event(), ""
        self.order: list[str] = []

    def write(self, image: Any, target: Any, **options: Any) -> Transfer:
        assert self.go.wait(30)
        self.order.append(image.path)
        if image.path == self.fails:
            raise TransferError(5, "refused", image.path)
        return super().write(image, target, **options)


@contextmanager
def files(writer: BufferedWriter, **options: Any) -> Iterator[BackgroundFiles]:
    made = BackgroundFiles(writer, **options)
    try:
        yield made
    finally:
        if isinstance(writer, Held):
            writer.go.set()
        made.close()


def test_the_file_is_stock_and_as_it_was(tmp_path: Path) -> None:
    """It equals torch.save's file of the state at the time of the call."""
    state = {"a": torch.arange(100_000), "b": torch.randn(3, 5).t(), "c": {"d": 4}}
    (tmp_path / "stock").mkdir()
    torch.save(state, tmp_path / "stock" / "f.pt")
    writer = Held()
    with files(writer) as background:
        save = background.save(state, tmp_path / "f.pt", step=7)
        state["a"].zero_()
        state["c"]["d"] = 5
        assert not (tmp_path / "f.pt").exists()
        assert save.on_the_way
        writer.go.set()
        background.wait()
        assert save.status == "committed"
        assert save.transfer is not None
        assert save.transfer.durable
    assert (tmp_path / "f.pt").read_bytes() == (tmp_path / "stock" / "f.pt").read_bytes()


def test_a_relative_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is relative to the working directory at the time of the save."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    writer = Held()
    with files(writer) as background:
        background.save({"a": 1}, "f.pt")
        monkeypatch.chdir(tmp_path / "elsewhere")
        writer.go.set()
        background.wait()
    assert (tmp_path / "f.pt").is_file()
    assert absolute("s3://bucket/run/f.pt") == "s3://bucket/run/f.pt"


def test_none_is_dropped(tmp_path: Path) -> None:
    """All files are written in their order, and `afterwards` keeps its place among them."""
    writer = Held()
    with files(writer, slots=4) as background:
        for number in range(4):
            background.save({"n": torch.full((9,), number)}, tmp_path / f"{number}.pt")
            if number == 1:
                background.afterwards(lambda: writer.order.append("then"))
        assert writer.order == []
        writer.go.set()
        background.wait()
        assert writer.order == ["0.pt", "1.pt", "then", "2.pt", "3.pt"]
        background.afterwards(lambda: writer.order.append("now"))
        assert writer.order[-1] == "now"
    assert [int(torch.load(tmp_path / f"{n}.pt")["n"][0]) for n in range(4)] == [0, 1, 2, 3]


def test_a_failure_comes_back_once(tmp_path: Path) -> None:
    """The next save raises it and copies nothing, or `close` does, after which it saves again;
    calls after the failed file are not made."""
    writer = Held()
    writer.fails = "1.pt"
    with files(writer) as background:
        first = background.save({"n": 1}, tmp_path / "1.pt", step=5)
        background.afterwards(lambda: writer.order.append("never"))
        writer.go.set()
        background._persister.wait()
        with pytest.raises(TransferError, match="refused") as caught:
            background.save({"n": 2}, tmp_path / "2.pt")
        assert "step 5" in "".join(caught.value.__notes__)
        assert first.status == "failed"
        background.afterwards(lambda: writer.order.append("never"))
        background.save({"n": 1}, tmp_path / "1.pt")
        with pytest.raises(TransferError, match="refused"):
            background.close()
        background.save({"n": 3}, tmp_path / "3.pt")
    assert writer.order == ["1.pt", "1.pt", "3.pt"]
    assert [path.name for path in tmp_path.iterdir()] == ["3.pt"]


class HoldsSecond(Held):
    """Fails to write 1.pt, and then waits before 2.pt."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = "1.pt"
        self.second_begun, self.go_on = threading.Event(), threading.Event()

    def write(self, image: Any, target: Any, **options: Any) -> Transfer:
        if image.path == "2.pt":
            self.second_begun.set()
            assert self.go_on.wait(30)
        return super().write(image, target, **options)


@pytest.mark.parametrize("when", ["after it", "right after its look", "raised before"])
def test_nothing_follows_an_earlier_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """`afterwards` waits for all files before it, not only for the last: its call is not made
    whenever the first one fails, and even if that failure was raised already."""
    writer = HoldsSecond()
    background = BackgroundFiles(writer, slots=3)
    for name in ("1.pt", "2.pt"):
        background.save({"n": 1}, tmp_path / name)
    raise_failure = background.raise_failure

    def fails_then() -> None:
        raise_failure()
        writer.go.set()
        assert writer.second_begun.wait(30)

    with monkeypatch.context() as patch:
        if when == "right after its look":
            patch.setattr(background, "raise_failure", fails_then)
        background.afterwards(lambda: writer.order.append("never"))
    writer.go.set()
    raised = when == "raised before"
    if raised:
        assert writer.second_begun.wait(30)
        with pytest.raises(TransferError, match="refused"):
            background.raise_failure()
    writer.go_on.set()
    with contextlib.nullcontext() if raised else pytest.raises(TransferError, match="refused"):
        background.close()
    assert writer.order == ["1.pt", "2.pt"]
    background.afterwards(lambda: writer.order.append("then"))  # the failure was raised
    assert writer.order[-1] == "then"


def test_too_large(tmp_path: Path) -> None:
    """A copy that does not fit is refused before memory is taken."""
    with files(BufferedWriter(), budget=1 << 16) as background:
        with pytest.raises(StateError, match="budget"):
            background.save({"n": torch.zeros(1 << 16)}, tmp_path / "1.pt")
        background.save({"n": torch.zeros(16)}, tmp_path / "2.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["2.pt"]
    with pytest.raises(OptionError, match="slots=0"):
        BackgroundFiles(BufferedWriter(), slots=0)


def test_what_cannot_be_pickled(tmp_path: Path) -> None:
    """The slot is free again."""
    with files(BufferedWriter(), slots=1) as background:
        for _ in range(2):
            with pytest.raises((AttributeError, TypeError)):
                background.save({"f": threading.Lock()}, tmp_path / "1.pt")
        background.save({"n": 1}, tmp_path / "2.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["2.pt"]


def test_a_torch_that_writes_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own file is used unchanged."""
    monkeypatch.setattr(torch_image, "is_like_stock", lambda: False)
    with files(BufferedWriter()) as background:
        background.save({"n": torch.arange(9)}, tmp_path / "1.pt")
    assert torch.load(tmp_path / "1.pt")["n"].tolist() == list(range(9))


def test_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropped without close: saves in flight are finished, and a failure is reported."""
    writer = Held()
    background = BackgroundFiles(writer)
    background.save({"n": 1}, tmp_path / "1.pt")
    writer.go.set()
    del background
    assert (tmp_path / "1.pt").exists()
    background = BackgroundFiles(writer)
    writer.fails = "2.pt"
    background.save({"n": 1}, tmp_path / "2.pt")
    lost: list[str] = []
    monkeypatch.setattr(interpreter_end, "_lost", lost)  # pytest's own exit code would be 120
    with pytest.warns(RuntimeWarning, match="refused"):
        del background
    assert len(lost) == 1
