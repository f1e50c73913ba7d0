"""The states of copies that rank 0 sends to the others, and the answers of the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from iobench.checkpoint.save import Save
from iobench.errors import RankError
from iobench.ranks.control import Control
from iobench.remote.file_copier import FileCopier
from iobench.remote.local_tier import LocalTier, RemotePlace
from iobench.remote.queue import DrainQueue, Queued
from iobench.remote.remote import Remote, RemoteTier


class _Hub:
    """A Control that keeps the orders, and gives those of `orders` to a follower."""

    def __init__(self, *orders: dict[str, Any]) -> None:
        self.world = SimpleNamespace(rank=1, size=2, host="node1")
        self.leads, self.many = False, True
        self.sent: list[dict[str, Any]] = []
        self.answers: list[Any] = []
        self._orders = [*orders]

    def scatter(self, phase: str, orders: Any = None) -> Any:
        del phase
        if orders is not None:
            self.sent.append(orders[1])
            return None
        if not self._orders:
            raise RankError("no more orders")
        return self._orders.pop(0)

    def sub(self, name: str, *, deadline_s: float, aside: bool = False) -> _Hub:
        del name, deadline_s, aside
        return self

    def gather(self, phase: str, value: Any) -> None:
        del phase
        self.answers.append(value)


def _queued(step: int, **more: Any) -> Queued:
    return Queued(step=step, serial=step, since_s=0.0, created_s=0.0, **more)


def _copier(hub: _Hub) -> FileCopier:
    anything = cast(Any, None)
    return FileCopier(
        local=anything,
        remote=anything,
        limit=anything,
        queue=anything,
        control=cast(Control, hub),
    )


def _follower(hub: _Hub, tmp_path: Path) -> LocalTier:
    return LocalTier(tmp_path / "local", Remote(tmp_path / "remote"), cast(Control, hub))


def _saved(step: int) -> Save:
    return Save(step=step, status="committed", created_s=0.0)


def test_only_differences_are_sent() -> None:
    """Of 10,000 checkpoints one has changed, and one is gone."""
    hub = _Hub()
    copier = _copier(hub)
    entries = [_queued(step, state="verified") for step in range(10_000)]
    copier.tell(entries)
    copier.tell(entries)
    copier.tell([*entries[1:-1], replace(entries[-1], state="dropped")])
    assert len(hub.sent) == 2
    assert len(hub.sent[0]["states"]) == 10_000
    (changed,) = msgspec.convert(hub.sent[1]["states"], list[Queued])
    assert (changed.step, changed.state) == (9_999, "dropped")
    assert hub.sent[1]["gone"] == [[0, 0]]


def test_a_rank_follows_the_differences(tmp_path: Path) -> None:
    """Its copies are those that rank 0 has reported, until no tier has the checkpoint."""
    hub = _Hub()
    copier, follower = _copier(hub), _follower(hub, tmp_path)
    for step in (1, 2):
        follower.followed(_saved(step), step, direct=False)
    assert [one.state for one in follower.copies(_saved(1))] == ["durable", "waiting"]
    one, two = _queued(1, state="verified"), _queued(2, state="draining")
    copier.tell([two, one])
    copier.tell([two, replace(one, local=False)])
    _hear(follower, hub.sent)
    assert [copy.state for copy in follower.copies(_saved(1))] == ["verified"]
    assert [copy.state for copy in follower.copies(_saved(2))] == ["durable", "draining"]
    copier.tell([two])
    _hear(follower, hub.sent[-1:])
    assert follower.copies(_saved(1)) == []
    assert [copy.state for copy in follower.copies(_saved(2))] == ["durable", "draining"]


def _hear(follower: LocalTier, orders: list[dict[str, Any]]) -> None:
    """Let a rank follow these orders."""
    follower.drain.copier.control._orders[:] = orders  # type: ignore[attr-defined]  # a _Hub
    follower.drain._run()


def test_a_direct_save_is_known_at_once(tmp_path: Path) -> None:
    """Rank 0 reports the states of copies later, and each copy is reported to the user once."""
    hub, durable = _Hub(), list[int]()
    copier, follower = _copier(hub), _follower(hub, tmp_path)
    follower.drain.queue.on_durable = durable.append
    follower.followed(_saved(1), 1, direct=True)
    copier.tell([_queued(1, state="durable", local=False)])
    copier.tell([_queued(1, state="verified", local=False), _queued(2, state="verified")])
    _hear(follower, hub.sent)
    assert [copy.state for copy in follower.copies(_saved(1))] == ["verified"]
    assert durable == [1, 2]
    follower.followed(_saved(2), 2, direct=False)  # what rank 0 has reported is newer
    assert [copy.state for copy in follower.copies(_saved(2))] == ["durable", "verified"]
    follower.followed(_saved(2), 3, direct=False)  # saved anew
    assert [copy.state for copy in follower.copies(_saved(2))] == ["durable", "waiting"]


@pytest.mark.parametrize("fails", [None, ValueError("no such profile")])
@pytest.mark.parametrize("order", [{"files": "no list"}, {"files": []}, {}], ids=str)
def test_every_order_gets_an_answer(
    order: dict[str, Any], fails: Exception | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 waits for it without a deadline. An error of a client ends no thread."""

    def renew(self: RemoteTier) -> None:
        if fails is not None:
            raise fails

    monkeypatch.setattr(RemoteTier, "renew", renew)
    hub = _Hub({"do": "send", **order})
    _follower(hub, tmp_path).drain._run()
    ((answer),) = hub.answers
    assert answer["host"] == "node1"
    assert answer["error"][0] == 3  # of TransferError


def test_a_direct_save_is_recorded_before_the_drain_knows_it() -> None:
    """The drain's thread may look for what no tier has at any moment, also in between."""
    queue, ledger = DrainQueue(), set[int]()

    def recorded(step: int, *_: Any) -> None:
        queue.forget_settled(ledger.__contains__)
        ledger.add(step)
        queue.forget_settled(ledger.__contains__)

    def sent_directly(save: Save, serial: int, *_: Any) -> None:
        queue.put(replace(_queued(save.step, state="durable"), serial=serial, local=False))
        queue.forget_settled(ledger.__contains__)

    drain = SimpleNamespace(sent_directly=sent_directly)
    anything = cast(Any, None)
    place = RemotePlace(
        tier=cast(Any, SimpleNamespace(drain=drain, remote=SimpleNamespace(recorded=recorded))),
        local=anything,
        size_bytes=1,
        decision="it is faster",
        probe=False,
        limit_s=None,
    )
    place.committed(_saved(4), cast(Any, SimpleNamespace(size_bytes=1, serial=4)))
    assert [one.step for one in queue.entries()] == [4]
