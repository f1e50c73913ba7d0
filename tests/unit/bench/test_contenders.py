"""Contenders by name, and peers under the rules of the bench."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cli import app
from typer.testing import CliRunner

from iobench import peers
from iobench.bench import choose as contenders
from iobench.bench.choose import choose
from iobench.bench.contenders.base import Contender, WriterContender
from iobench.bench.contenders.peer import PeerContender
from iobench.errors import OptionError, UnavailableError, UnknownNameError, UsageError
from iobench.peers.base import Peer, State
from iobench.units import KIB, MIB
from iobench.workloads import Workload
from iobench.writers.registry import Registry, make

from .conftest import IdleMonitor, make_trial, replay_of


class Memory(Peer):
    """Keeps the saved state. Tests make it fail or return other data."""

    name = "memory"
    summary = "nothing on storage but a name"

    def __init__(self, change: Callable[[dict[str, torch.Tensor]], None] | None = None) -> None:
        super().__init__()
        self.change = change
        self.saved: dict[str, dict[str, torch.Tensor]] = {}

    def save(self, state: State, path: str) -> None:
        Path(path).write_bytes(b"x")
        kept = {name: tensor.clone() for name, tensor in state.items()}
        self.saved[Path(path).name] = kept

    def restore(self, path: str, wanted: State) -> State:
        found = self.saved[Path(path).name]
        if self.change:
            self.change(found)
        return found


def test_names_and_options() -> None:
    """Writers and peers are in one list, each with its own options."""
    found, left_out = choose("odirect,threads=3,peer:torch-save,crc=false,buffered", ".")
    assert [one.name for one in found] == ["odirect", "peer:torch-save", "buffered"]
    assert found[1].options == {"crc": False}
    assert [one.label for one in found] == [
        "odirect,threads=3",
        "peer:torch-save,crc=false",
        "buffered",
    ]
    assert left_out == []


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("peer:torch-sav", UnknownNameError, "did you mean 'torch-save'"),
        ("peer:torch-save,crx=1", UnknownNameError, "did you mean 'crc'"),
        ("peer:torch-save,crc=7", OptionError, "true or false"),
        ("peer:torch-save,peer:torch-save", UsageError, "twice"),
        ("null,odirect,null", UsageError, "with the same options twice"),
        ("odirect,threads=4,odirect", UsageError, "with the same options twice"),
        ("peer:", UnknownNameError, "unknown peer ''"),
    ],
)
def test_what_cannot_be_meant(text: str, error: type[Exception], message: str) -> None:
    """Invalid names, options and repetitions of peers are refused like those of writers."""
    with pytest.raises(error, match=message):
        choose(text, ".")


def test_all_that_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`all` takes every writer and peer that works there, and gives a reason for the others."""

    class Missing(Memory):
        modules = ("no_such_module",)
        packages = "iobench[no-such]"

    answers: dict[str, type[Peer]] = {"memory": Memory, "missing": Missing}
    monkeypatch.setattr(peers, "names", lambda: sorted(answers))
    monkeypatch.setattr(peers, "make", lambda name: answers[name]())
    monkeypatch.setattr(contenders.registry, "names", lambda: ["buffered", "null", "s3"])
    found, (why,) = choose("all", tmp_path)
    assert [one.name for one in found] == ["buffered", "peer:memory"]
    assert "No module named 'no_such_module'. Type: pip install iobench[no-such]." in why
    more, _ = choose("all,buffered,buffered,threads=2", tmp_path)
    assert [one.label for one in more] == ["buffered", "buffered,threads=2", "peer:memory"]
    with pytest.raises(UsageError, match="all takes no options"):
        choose("buffered,all,threads=2", tmp_path)


def test_equal_terms() -> None:
    """In a run with peers, restores of our writers also allocate their memory inside the clock."""
    alone, _ = choose("buffered", ".")
    beside, _ = choose("buffered,peer:torch-save", ".")
    assert isinstance(alone[0], WriterContender)
    assert isinstance(beside[0], WriterContender)
    assert (alone[0].fresh, beside[0].fresh) == (False, True)


@pytest.mark.parametrize("pool_bytes", [MIB, 4 * KIB])
@pytest.mark.parametrize("name", ["buffered", "peer"])
def test_every_byte_comes_back(
    tmp_path: Path, tiny: Workload, idle: Any, name: str, pool_bytes: int
) -> None:
    """All formats restore correctly into new memory, for any size of the pool; one wrong byte is
    found."""

    def flip(state: dict[str, torch.Tensor]) -> None:
        next(iter(state.values())).view(-1).view(torch.uint8)[-1] ^= 1

    for change, expected in ((None, 0), (flip, len(tiny.files()))):
        contender: Contender = WriterContender(make("buffered"), fresh=True)
        if name == "peer":
            contender = PeerContender(Memory(change))
        elif change:
            continue
        directory = tmp_path / f"{name}{expected}"
        directory.mkdir()
        one = make_trial(contender, tiny, directory, idle)
        one.save()
        sample = one.restore()
        assert sample is not None
        assert sample.verified is not None
        assert sample.verified.mismatches == expected
        assert sample.verified.tensors == sum(len(file.tensors) for file in tiny.files())
        assert sample.bytes == replay_of(one).size_bytes()


@pytest.mark.parametrize(
    "lose",
    [
        lambda state: state.pop(next(iter(state))),
        lambda state: state.update({k: v.reshape(-1, 1) for k, v in state.items()}),
        lambda state: state.update({k: v.to(torch.float64) for k, v in state.items()}),
    ],
    ids=["missing", "reshaped", "retyped"],
)
def test_what_is_not_the_same_tensor(
    tmp_path: Path, tiny: Workload, idle: Any, lose: Callable[..., Any]
) -> None:
    """A missing, reshaped or converted tensor is wrong, whatever its bytes."""
    one = make_trial(PeerContender(Memory(lose)), tiny, tmp_path, idle)
    one.save()
    sample = one.restore()
    assert sample is not None
    assert sample.verified is not None
    assert sample.verified.mismatches >= len(tiny.files())


@pytest.mark.parametrize("syncs", [False, True])
def test_what_a_peer_does_not_sync_is_synced_for_it(
    tmp_path: Path, tiny: Workload, idle: Any, monkeypatch: pytest.MonkeyPatch, syncs: bool
) -> None:
    """Its files are synced inside the clock before they are renamed, unless it syncs them
    itself."""
    synced: list[str] = []
    fsync = os.fsync

    def recorded(fd: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", recorded)
    peer = Memory()
    peer.syncs = syncs
    sample = make_trial(PeerContender(peer), tiny, tmp_path, idle).save()
    assert sample is not None
    names = [Path(file.path).name for file in tiny.files()]
    assert [name for name in synced if name in names] == ([] if syncs else names)
    assert ("sync" in sample.phases_s) is not syncs


def test_one_that_only_restores(tmp_path: Path, tiny: Workload, idle: Any) -> None:
    """It gets safetensors files of another writer, and its save is not reported."""
    from safetensors.torch import load_file

    class Reader(Memory):
        saves = False

        def restore(self, path: str, wanted: State) -> State:
            return load_file(path)

    one = make_trial(PeerContender(Reader()), tiny, tmp_path, idle)
    assert one.save() is None
    sample = one.restore()
    assert sample is not None
    assert sample.verified is not None
    assert sample.verified.mismatches == 0


_THIRD_PARTY = """
from dataclasses import dataclass
import torch
from iobench.peers.base import Peer
from iobench.writers.options import WriterOptions, option

@dataclass(frozen=True, kw_only=True)
class MineOptions(WriterOptions):
    depth: int = option(1, help="How deep.")

class Mine(Peer):
    name = "mine"
    summary = "a peer of another package"
    suffix = ".pt"
    Options = MineOptions

    def save(self, state, path):
        torch.save(dict(state), path)

    def restore(self, path, wanted):
        return torch.load(path, weights_only=True)
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of a third party: one peer that works and two that cannot be loaded."""
    site = tmp_path / "site"
    (site / "mine-1.dist-info").mkdir(parents=True)
    (site / "mine-1.dist-info/METADATA").write_text("Name: mine\nVersion: 1\n")
    (site / "mine-1.dist-info/entry_points.txt").write_text(
        "[iobench.peers]\nmine = mine_peer:Mine\n"
        "gone = no_such_package:Peer\nother = mine_peer:MineOptions\n"
    )
    (site / "mine_peer.py").write_text(_THIRD_PARTY)
    monkeypatch.syspath_prepend(site)
    fresh: Registry[Peer] = Registry(peers.GROUP, Peer, noun="peer", prefix=peers.PREFIX)
    monkeypatch.setattr(peers, "_PEERS", fresh)  # the entry points are read once per process
    monkeypatch.setattr(peers, "names", fresh.names)
    monkeypatch.setattr(peers, "peer_class", fresh.find)


@pytest.mark.usefixtures("installed")
def test_a_peer_of_another_package(tmp_path: Path, tiny: Workload, idle: IdleMonitor) -> None:
    """It is chosen, measured and listed like our peers; one that cannot be loaded gives its
    reason."""
    (one,), _ = choose("peer:mine,depth=3", tmp_path)
    assert (one.label, one.options) == ("peer:mine,depth=3", {"depth": 3})
    trial = make_trial(one, tiny, tmp_path, idle)
    assert trial.save() is not None
    restored = trial.restore()
    assert restored is not None
    assert restored.verified is not None
    assert restored.verified.tensors > restored.verified.mismatches == 0
    listed = CliRunner().invoke(app, ["writers", "--target", str(tmp_path), "--format", "json"])
    found = {entry["name"]: entry for entry in json.loads(listed.stdout)["peers"]}
    assert {"peer:torch-save", "peer:mine", "peer:gone", "peer:other"} <= set(found)
    assert found["peer:mine"]["available"]
    assert not found["peer:gone"]["available"]
    for name, why in (("gone", "No module named 'no_such_package'"), ("other", "is not a Peer")):
        with pytest.raises(UnavailableError, match=rf"^peer:{name} is not available here: .*{why}"):
            choose(f"peer:{name}", tmp_path)
        assert why in found[f"peer:{name}"]["reason"]


@pytest.mark.parametrize("name", peers.names())
def test_peers_are_registered_under_their_own_names(name: str) -> None:
    assert peers.peer_class(name).name == name
