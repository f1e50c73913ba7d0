"""What rank 0 announces of a save whose place fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

from iobench.checkpoint.commit import Committer
from iobench.checkpoint.content import Content
from iobench.checkpoint.ledger import Ledger
from iobench.checkpoint.place import Format, Place, SaveParticipant
from iobench.checkpoint.save import Save
from iobench.errors import TransferError
from iobench.ranks.control import Control
from iobench.writers.buffered import BufferedWriter


class _Job:
    """The calls of rank 0 in a job of two ranks; the other one votes yes."""

    world = SimpleNamespace(size=2, rank=0)
    hosts = ("a", "b")

    def __init__(self) -> None:
        self.told: list[Any] = []

    def broadcast(self, phase: str, value: Any) -> None:
        del phase
        self.told.append(value)

    def gather(self, phase: str, value: Any) -> list[Any]:
        del phase
        return [value, {"checksum": ""}]


class _Place:
    """A directory, or a remote tier that does not answer, with the directory in its place."""

    store, writer, decision, limit_s = None, BufferedWriter(), "", None

    def __init__(self, instead: _Place | None = None) -> None:
        self.other, self.remote = instead, instead is not None

    @contextmanager
    def staged(self, save: Save, serial: int) -> Iterator[Any]:
        del save, serial
        if self.remote:
            raise TransferError("no answer")
        yield SimpleNamespace(directory="step-1")

    def instead(self, save: Save, failure: BaseException) -> _Place | None:
        del save, failure
        return self.other

    def committed(self, save: Save, manifest: Any) -> None: ...

    def probe_bytes(self, ranks: int) -> int:
        return 0 * ranks


class _Files:
    def write(self, *_: Any) -> Any:
        return SimpleNamespace(transfer=SimpleNamespace(durable=True), checksum="", file=None)

    def publish(self, *_: Any) -> None: ...


def test_the_others_hear_of_dropped_saves_when_the_first_place_fails_at_once() -> None:
    """They would keep the snapshots of those saves, and wait for their turn, for ever."""
    job, gone = _Job(), [7]
    save = Save(step=1, status="waiting", created_s=0.0)
    committer = Committer(
        control=cast(Control, job),
        format=cast(Format, _Files()),
        writer=BufferedWriter(),
        ledger=cast(Ledger, SimpleNamespace(serial_of=lambda _: 1)),
        place=lambda *_: cast(Place, _Place(_Place())),
        participant=SaveParticipant(),
        gone=lambda: [gone.pop() for _ in range(len(gone))],
    )
    committer.commit(save, cast(Content, SimpleNamespace(number=8, size_bytes=1)))
    order, ending = job.told
    assert (order.number, order.directory, order.gone) == (8, "step-1", [7])
    assert not ending.failed
    assert save.status == "committed"
