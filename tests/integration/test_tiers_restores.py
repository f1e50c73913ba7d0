"""Restores from several tiers: both at once, piece by piece, and filling the local tier."""

from __future__ import annotations

import secrets
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.s3_servers import s3_server
from support.tiers import SIZE, damage, events, settled, state, until

from iobench import Checkpointer, Remote, load_checkpoint
from iobench.errors import DataMismatchError, TransferError, UsageError
from iobench.testing import LocalS3
from iobench.tiers import both_tiers, nearest, warm
from iobench.tiers.both_tiers import BothTiers
from iobench.tiers.drain_step import DrainStep
from iobench.tiers.remote_list import RemoteList
from iobench.units import MIB

_SMALL = 1000

pytestmark = pytest.mark.filterwarnings("ignore:copies to:RuntimeWarning")


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """The directory of the checkpoints."""
    return tmp_path / "local"


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    """The directory of the remote tier."""
    return tmp_path / "remote"


@pytest.fixture(scope="module")
def server() -> Iterator[LocalS3]:
    """A real S3 server."""
    with s3_server("moto") as running, running.active():
        yield running


def _saved(local: Path, remote: Any, what: Any = None) -> None:
    """Save a checkpoint of step 1 to both tiers."""
    with Checkpointer(local, tiers=[Remote(remote)]) as ckpt:
        ckpt.save(state(1) if what is None else what, 1)
        until(lambda: settled(ckpt))


class _Turns:
    """Small ranges, and a local tier that begins after the first one from the remote tier."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in {"_LEAST": 0, "_LEAST_LOCAL": MIB, "_MOST_LOCAL": MIB}.items():
            monkeypatch.setattr(both_tiers, name, value)
        monkeypatch.setattr(both_tiers, "_LEAST_REMOTE", MIB)
        monkeypatch.setattr(both_tiers, "_LEAST_GAIN", 1e9)
        self.delivered, self.local_reads = threading.Event(), 0
        self.fails = False
        monkeypatch.setattr(both_tiers._SharedRead, "_fill", self._wrapped_fill())
        monkeypatch.setattr(BothTiers, "read_local", self._wrapped_read())

    def _wrapped_fill(self) -> Any:
        original = both_tiers._SharedRead._fill

        def fill(*arguments: Any) -> None:
            original(*arguments)
            self.delivered.set()

        return fill

    def _wrapped_read(self) -> Any:
        original = BothTiers.read_local

        def read(tiers: BothTiers, image: Any, target: Any, part: Any) -> Any:
            if image.size_bytes > MIB:
                assert self.delivered.wait(60), "the remote tier did not help"
            self.local_reads += 1
            if self.fails and image.size_bytes > MIB:
                original(tiers, image, target, part)  # all of it was compared already
                raise TransferError("the local disk is gone")
            return original(tiers, image, target, part)

        return read


@pytest.mark.parametrize("kind", ["directory", "bucket"])
def test_from_both_tiers_at_once(
    kind: str, local: Path, remote: Path, server: LocalS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large file: both tiers deliver a part, every byte is right, and it is told."""
    there: Any = remote if kind == "directory" else f"{server.target}/{secrets.token_hex(4)}"
    what = {"w": torch.arange(SIZE, dtype=torch.float32), "step": 1}
    _saved(local, there, what)
    turns = _Turns(monkeypatch)
    with Checkpointer(local, tiers=[Remote(there)]) as ckpt:
        loaded = ckpt.load()
        assert ckpt.loaded is not None
        sources = ckpt.loaded.sources
    assert torch.equal(loaded["w"], what["w"])
    assert turns.local_reads
    assert sources[str(local)] == "read in part"
    assert sources[str(there)].startswith("read ")
    assert ckpt.loaded.transfer.bytes > 4 * SIZE


def test_a_piece_is_read_from_the_other_tier(local: Path, remote: Path) -> None:
    """Only the damaged piece comes from the remote tier."""
    what = {name: torch.full((SIZE // 4,), float(number)) for number, name in enumerate("abcd")}
    _saved(local, remote, what)
    file = local / "step-1" / "tensors.safetensors"
    with file.open("r+b") as opened:
        opened.seek(-100, 2)
        opened.write(b"\xff" * 10)
    with Checkpointer(local, tiers=[Remote(remote)]) as ckpt:
        with pytest.warns(RuntimeWarning, match="in part: tensors.safetensors is damaged, 1 chec"):
            loaded = ckpt.load()
        assert ckpt.loaded is not None
        sources = ckpt.loaded.sources
    assert {name: loaded[name].unique().tolist() for name in "abcd"} == {
        name: [float(number)] for number, name in enumerate("abcd")
    }
    assert sources[str(remote)] == "read 4.77 MiB"
    assert "damaged" in sources[str(local)]


def test_damage_in_both_tiers(local: Path, remote: Path) -> None:
    """The same piece: it is an error, and never a wrong byte."""
    _saved(local, remote)
    for tier in (local, remote):
        damage(tier / "step-1" / "tensors.safetensors")
    with Checkpointer(local, tiers=[Remote(remote)]) as ckpt, pytest.raises(DataMismatchError):
        ckpt.load()


def test_what_the_remote_tier_delivers_is_compared_too(
    local: Path, remote: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged remote copy: its piece is read again from the local tier."""
    _saved(local, remote)
    with (remote / "step-1" / "tensors.safetensors").open("r+b") as opened:
        opened.seek(-100, 2)
        opened.write(b"\xff" * 10)
    _Turns(monkeypatch)
    with Checkpointer(local, tiers=[Remote(remote)]) as ckpt:
        loaded = ckpt.load()
        assert ckpt.loaded is not None
        assert "damaged" in ckpt.loaded.sources[str(remote)]
    assert loaded["w"].unique().tolist() == [1]


def test_the_remote_tier_reads_the_rest(
    local: Path, remote: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The local disk fails in the middle of the file."""
    _saved(local, remote)
    turns = _Turns(monkeypatch)
    turns.fails = True
    gone = pytest.warns(RuntimeWarning, match="the local disk is gone")
    with Checkpointer(local, tiers=[Remote(remote)]) as ckpt, gone:
        loaded = ckpt.load()
    assert loaded["w"].unique().tolist() == [1]


def test_what_is_read_again_is_compared_again(
    local: Path, remote: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The local read has delivered right bytes when it fails; the remote ones are damaged."""
    _saved(local, remote, {"a": torch.zeros(MIB // 8), "w": torch.zeros(SIZE)})
    with (remote / "step-1" / "tensors.safetensors").open("r+b") as opened:
        opened.seek(MIB // 4)
        opened.write(b"\xff" * 10)
    turns = _Turns(monkeypatch)
    turns.fails = True
    told = pytest.warns(RuntimeWarning, match="the local disk is gone")
    with Checkpointer(local, tiers=[Remote(remote)]) as ckpt, told:
        loaded = ckpt.load()
        assert ckpt.loaded is not None
        assert "damaged" in ckpt.loaded.sources[str(remote)]
    assert not loaded["a"].any()


def test_a_copy_of_another_save_does_not_help(
    local: Path, remote: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same step, saved anew: the older copy in the remote tier is not used."""
    _saved(local, remote)
    with Checkpointer(local) as ckpt:
        ckpt.remove(1)
        ckpt.save({**state(1), "again": True}, 1)
    turns = _Turns(monkeypatch)
    turns.delivered.set()  # nothing will be
    copied, original = threading.Event(), DrainStep.send

    def send(step: DrainStep, entry: Any, *, again: bool) -> int | None:
        assert copied.wait(60)
        return original(step, entry, again=again)

    monkeypatch.setattr(DrainStep, "send", send)
    with Checkpointer(local, tiers=[Remote(remote)]) as ckpt:
        assert ckpt.load()["again"] is True
        assert ckpt.loaded is not None
        assert ckpt.loaded.sources == {str(local): "read"}
        copied.set()


class _LateList:
    """A remote tier whose list is answered when `answer` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answer, self.asked = threading.Event(), threading.Event()
        original = RemoteList._listed

        def listed(asking: RemoteList) -> Any:
            self.asked.set()
            assert self.answer.wait(60)
            return original(asking)

        monkeypatch.setattr(RemoteList, "_listed", listed)


def test_a_remote_tier_that_hangs_delays_no_restore(
    local: Path, remote: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The local checkpoint is read before there is an answer, whenever that comes."""
    _saved(local, remote, state(1, _SMALL))
    late = _LateList(monkeypatch)
    monkeypatch.setattr(nearest, "_ANSWER_S", 3600.0)
    ckpt = Checkpointer(local, tiers=[Remote(remote)])  # does not wait
    assert late.asked.wait(60)
    original, read = nearest.Nearest._restored, list[int]()

    def restored(self: Any, *arguments: Any) -> Any:
        found = original(self, *arguments)
        read.append(found[1].step)
        assert not late.answer.is_set()
        nearest._ANSWER_S = 0.0  # no answer in time
        return found

    monkeypatch.setattr(nearest.Nearest, "_restored", restored)
    with pytest.warns(RuntimeWarning, match="no answer within 0 s"):
        assert ckpt.load()["step"] == 1
    assert read == [1]
    late.answer.set()
    ckpt.close()


def test_a_later_save_of_another_node_counts(
    local: Path, remote: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its list comes while the older local checkpoint is read, which is then not returned."""
    _saved(local, remote, state(1, _SMALL))
    with Checkpointer(local.with_name("other"), tiers=[Remote(remote)]) as other:
        other.load()
        other.save(state(2, _SMALL), 2)
    late = _LateList(monkeypatch)
    original, read = nearest.Nearest._restored, list[int]()

    def restored(self: Any, *arguments: Any) -> Any:
        found = original(self, *arguments)
        read.append(found[1].step)
        late.answer.set()
        return found

    monkeypatch.setattr(nearest.Nearest, "_restored", restored)
    with Checkpointer(local, tiers=[Remote(remote)]) as ckpt:
        assert ckpt.load()["step"] == 2
        assert read == [1, 2]
        ckpt.save(state(3, _SMALL), 3)
        assert ckpt.latest() == 3


@pytest.mark.parametrize("kind", ["directory", "bucket"])
def test_warm_fills_the_local_tier(kind: str, local: Path, remote: Path, server: LocalS3) -> None:
    """A whole local checkpoint with the same manifest results, from which the next load reads."""
    there: Any = remote if kind == "directory" else f"{server.target}/{secrets.token_hex(4)}"
    _saved(local, there)
    manifest = (local / "step-1" / "manifest.json").read_bytes()
    shutil.rmtree(local)
    with Checkpointer(local, tiers=[Remote(there)]) as ckpt:
        assert ckpt.load(warm=True)["w"].unique().tolist() == [1]
        assert ckpt.loaded is not None
        assert ckpt.loaded.sources == {str(there): f"copied to {local}", str(local): "read"}
        assert load_checkpoint(local)["w"].unique().tolist() == [1]
        assert (local / "step-1" / "manifest.json").read_bytes() == manifest
        assert ckpt.load()["step"] == 1
        assert str(there) not in ckpt.loaded.sources
        ckpt.save(state(2, _SMALL), 2)
        assert ckpt.latest() == 2
    assert [one.step for one in events(local, "durable")] == [2], "it was copied back"


def test_warm_without_room(local: Path, remote: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told, and the state is read from the remote tier."""
    _saved(local, remote, state(1, _SMALL))
    shutil.rmtree(local)
    monkeypatch.setattr(warm, "_free_bytes", lambda _: 100)
    with Checkpointer(local, tiers=[Remote(remote)]) as ckpt:
        with pytest.warns(RuntimeWarning, match="step 1 is not copied to .*100 B are free"):
            assert ckpt.load(warm=True)["step"] == 1
        assert ckpt.loaded is not None
        assert ckpt.loaded.sources == {str(remote): "read"}
    assert not (local / "step-1").exists()


def test_warm_copies_no_damage(local: Path, remote: Path) -> None:
    """A damaged remote copy never becomes a local checkpoint."""
    _saved(local, remote)
    shutil.rmtree(local)
    damage(remote / "step-1" / "tensors.safetensors")
    with Checkpointer(local, tiers=[Remote(remote)]) as ckpt:
        with pytest.raises(DataMismatchError):
            ckpt.load(warm=True)
        assert not [path for path in local.iterdir() if "step" in path.name]


def test_warm_needs_tiers(local: Path) -> None:
    """It says so."""
    with Checkpointer(local) as ckpt, pytest.raises(UsageError, match="needs tiers"):
        ckpt.load(warm=True)
