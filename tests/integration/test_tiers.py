"""Tiers: checkpoints of a directory, and their copies in a remote tier."""

import itertools
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiers import damage, events, names, settled, state, until

from iobench import Checkpointer, KeepLast, Memory, Remote, load_checkpoint
from iobench.checkpoint import ledger
from iobench.checkpoint.object_store import ObjectStore
from iobench.checkpoint.save import Copy
from iobench.errors import OptionError, TargetError, TransferError
from iobench.remote.drain import late
from iobench.remote.file_copier import FileCopier
from iobench.remote.remote import RemoteTier
from iobench.remote.remote_copy import DRAINING_SUFFIX, DirectoryCopy
from iobench.remote.tiered_store import TieredStore
from iobench.writers.s3 import S3Writer
from iobench.writers.s3_store.objects import S3Objects
from iobench.writers.s3_store.target import S3Target

# The drain gives it in its own thread, at any moment.
pytestmark = pytest.mark.filterwarnings("ignore:copies to:RuntimeWarning")

_SMALL = 1000


def _take_away(remote: Path) -> None:
    """Make the remote tier fail: a file has its name."""
    remote.rename(remote.with_name("away"))
    remote.write_text("a file in the way")


def _bring_back(remote: Path) -> None:
    remote.unlink()
    remote.with_name("away").rename(remote)


def test_saved_copied_and_read_back(local, remote) -> None:
    """Every checkpoint gets to the remote tier, and nothing else."""
    with Checkpointer(local, tiers=[Remote(remote)]) as ckpt:
        saves = [ckpt.save_async(state(step), step) for step in (1, 2)]
        ckpt.wait(until="remote")
        until(lambda: settled(ckpt))
        assert [save.copies for save in saves] == 2 * [
            [Copy(tier=str(local), state="durable"), Copy(tier=str(remote), state="verified")]
        ]
    assert names(remote) == names(local) == {"step-1", "step-2"}
    for step in (1, 2):
        assert load_checkpoint(remote, step)["w"].unique().tolist() == [step]
    assert {one.step for one in events(local, "verified")} == {1, 2}
    sent = {one.step: (one.sent_bytes, one.size_bytes) for one in events(local, "durable")}
    size = sum(path.stat().st_size for path in (local / "step-1").iterdir())
    manifest = (local / "step-1" / "manifest.json").stat().st_size
    assert sent[1] == (size - manifest, size)


def test_a_lower_copy_goes_only_after_the_upper_one_was_read_back(local, remote) -> None:
    """While the remote tier cannot be written, local retention removes nothing that is not there.
    When it answers again, it gets every checkpoint, and the local ones go with the next save."""
    with Checkpointer(local, keep=KeepLast(1), tiers=[Remote(remote)]) as ckpt:
        ckpt.save(state(0, _SMALL), 0)
        until(lambda: settled(ckpt))
        _take_away(remote)
        saves = [ckpt.save(state(step, _SMALL), step) for step in (1, 2, 3)]
        drain = ckpt._tier.drain
        until(lambda: drain.failure is not None)
        assert names(local) == {"step-1", "step-2", "step-3"}
        assert {save.copies[1].state for save in saves} <= {"waiting", "draining"}
        _bring_back(remote)
        until(lambda: settled(ckpt))
        assert names(remote) == {"step-0", "step-1", "step-2", "step-3"}
        ckpt.save(state(4, _SMALL), 4)
        until(lambda: settled(ckpt))
        ckpt.save(state(5, _SMALL), 5)
        until(lambda: names(local) <= {"step-4", "step-5"})


def test_wait_raises_what_failed_and_close_goes_on_without(local, remote) -> None:
    """A dead remote tier stops neither training nor its end; the next Checkpointer goes on."""
    ckpt = Checkpointer(local, tiers=[Remote(remote)])
    ckpt.save(state(1, _SMALL), 1)
    ckpt.wait(until="remote")
    _take_away(remote)
    ckpt.save(state(2, _SMALL), 2)
    with pytest.raises((TargetError, TransferError)):
        ckpt.wait(until="remote")
    with pytest.warns(RuntimeWarning, match=r"steps \[2\] are not in"):
        ckpt.close()
    _bring_back(remote)
    with Checkpointer(local, tiers=[Remote(remote)]):
        pass
    assert load_checkpoint(remote)["step"] == 2


def test_a_new_run_needs_an_answer(local, remote) -> None:
    """With an empty directory, checkpoints that cannot be seen might be overlooked."""
    remote.write_text("a file in the way")
    with pytest.raises(TargetError):
        Checkpointer(local, tiers=[Remote(remote)])
    remote.unlink()
    with Checkpointer(local, tiers=[Remote(remote)]) as ckpt:
        ckpt.save(state(1, _SMALL), 1)


def test_a_new_run_is_newer_than_what_the_remote_tier_has(local, remote) -> None:
    """Also if the new node saves before it loads: its checkpoint is the newest one everywhere."""
    with Checkpointer(local, tiers=[Remote(remote)]) as ckpt:
        for step in (10, 20, 30):
            ckpt.save(state(step, _SMALL), step)
    shutil.rmtree(local)
    with Checkpointer(local, tiers=[Remote(remote)]) as ckpt:
        ckpt.save(state(5, _SMALL), 5)
        assert ckpt.latest() == 5
    assert load_checkpoint(remote)["step"] == 5


def test_a_damaged_local_copy_is_read_from_the_remote_tier(local, remote) -> None:
    """Nearest valid copy, and it is told."""
    with Checkpointer(local, tiers=[Remote(remote)]) as ckpt:
        ckpt.save(state(1, _SMALL), 1)
        until(lambda: settled(ckpt))
        damage(local / "step-1" / "tensors.safetensors")
        with pytest.warns(RuntimeWarning, match=f"step 1 is read from {remote}"):
            assert ckpt.load()["w"].unique().tolist() == [1]
        assert list(ckpt.loaded.sources) == [str(local), str(remote)]
        os.truncate(local / "step-1" / "tensors.safetensors", 100)
        with pytest.warns(RuntimeWarning, match=f"step 1 is read from {remote}"):
            assert ckpt.load()["w"].unique().tolist() == [1]
        assert ckpt.loaded.sources[str(remote)] == "read"
        damage(local / "step-1" / "manifest.json")
        with pytest.warns(RuntimeWarning, match=f"step 1 is read from {remote}"):
            assert ckpt.load()["step"] == 1


def test_damage_on_the_way_is_found_and_sent_again(local, remote, monkeypatch) -> None:
    """The read-back finds a wrong byte in the remote tier. The local copy is still there."""
    original, calls = DirectoryCopy.publish, []

    def publish(self: DirectoryCopy, manifest: bytes) -> None:
        original(self, manifest)
        if not calls:
            damage(remote / "step-1" / "tensors.safetensors")
        calls.append(1)

    monkeypatch.setattr(DirectoryCopy, "publish", publish)
    with Checkpointer(local, tiers=[Remote(remote)]) as ckpt:
        ckpt.save(state(1, _SMALL), 1)
        until(lambda: settled(ckpt))
    assert len(calls) == 2
    assert any("damaged" in one.why for one in events(local, "failed"))
    assert load_checkpoint(remote)["w"].unique().tolist() == [1]


def test_the_directory_stays_locked_while_a_copy_is_on_its_way(local, remote, monkeypatch) -> None:
    """A remote tier does not answer when the Checkpointer is closed; it may publish later."""
    original, asked, answers = DirectoryCopy.publish, threading.Event(), threading.Event()

    def publish(self: DirectoryCopy, manifest: bytes) -> None:
        asked.set()
        answers.wait(60)
        original(self, manifest)

    monkeypatch.setattr(DirectoryCopy, "publish", publish)
    monkeypatch.setattr("iobench.remote.drain._JOIN_S", 0.05)
    ckpt = Checkpointer(local, tiers=[Remote(remote)])
    ckpt.save(state(1, _SMALL), 1)
    ckpt.wait()
    assert asked.wait(60)
    ckpt._tier.drain._set_failure(TransferError("it does not answer"))  # `close` does not wait
    with (
        pytest.warns(RuntimeWarning, match="are not in"),
        pytest.warns(RuntimeWarning, match="stays locked until"),
    ):
        ckpt.close()
    with pytest.raises(TargetError, match="is in use"):
        Checkpointer(local)
    answers.set()
    until(lambda: names(remote) == {"step-1"})
    until(lambda: _is_free(local))


def _is_free(directory: Path) -> bool:
    try:
        Checkpointer(directory).close()
    except TargetError:
        return False
    return True


def test_a_copy_of_a_damaged_local_checkpoint_is_read_back(local, remote, monkeypatch) -> None:
    """The local manifest is damaged after the copy: that of the copy says what it must be."""
    original = FileCopier.verify

    def verify(self: FileCopier, entry: Any) -> bool:
        damage(local / "step-1" / "manifest.json")
        return original(self, entry)

    monkeypatch.setattr(FileCopier, "verify", verify)
    with Checkpointer(local, tiers=[Remote(remote)]) as ckpt:
        save = ckpt.save(state(1, _SMALL), 1)
        until(lambda: settled(ckpt))
        assert save.copies[1].state == "verified"
    assert load_checkpoint(remote)["step"] == 1


def test_dropped_past_max_backlog(local, remote) -> None:
    """Only the newest one is copied when the remote tier was away for too long; so the local tier
    does not fill."""
    tier = Remote(remote, max_backlog=0.001)
    with Checkpointer(local, keep=KeepLast(1), tiers=[tier]) as ckpt:
        ckpt.save(state(0, _SMALL), 0)
        until(lambda: settled(ckpt))
        _take_away(remote)
        saves = [ckpt.save(state(step, _SMALL), step) for step in (1, 2, 3)]
        # No copy is listed once the local tier has removed it too.
        until(lambda: not (found := saves[0].copies) or found[-1].state == "dropped")
        ckpt.save(state(4, _SMALL), 4)
        assert len(names(local)) < 4
        _bring_back(remote)
        until(lambda: settled(ckpt))
    assert "step-4" in names(remote)
    assert "step-1" not in names(remote)


class _Held:
    """Holds each copy until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.sent = threading.Semaphore(0), list[int]()
        original = FileCopier.copy

        def send(step: FileCopier, entry: Any) -> int | None:
            assert self.go.acquire(timeout=60)
            found = original(step, entry)
            self.sent.append(entry.step)
            return found

        monkeypatch.setattr(FileCopier, "copy", send)

    def release(self, count: int = 1000) -> None:
        self.go.release(count)


def test_every_save_reaches_the_remote_tier(local, remote, monkeypatch) -> None:
    """With every_save, in the order of the saves; also one that retention removes there at once."""
    held = _Held(monkeypatch)
    tier = Remote(remote, keep=KeepLast(1), every_save=True)
    with Checkpointer(local, keep=KeepLast(1), slots=4, tiers=[tier]) as ckpt:
        saves = [ckpt.save_async(state(step, _SMALL), step) for step in range(1, 7)]
        ckpt.wait()
        assert [save.status for save in saves] == 6 * ["committed"]
        held.release()
        until(lambda: settled(ckpt))
    assert held.sent == [1, 2, 3, 4, 5, 6]
    assert [one.step for one in events(local, "durable")] == [1, 2, 3, 4, 5, 6]
    assert names(remote) == {"step-6"}


def test_a_save_waits_for_the_backlog(local, remote, monkeypatch) -> None:
    """With on_backlog="wait" until the copy before it is done. The Save says how long."""
    held = _Held(monkeypatch)
    waiting = threading.Thread(target=held.release)

    def exceeds(*arguments: Any) -> list[Any]:
        found = late(*arguments)
        in_save = threading.current_thread() is threading.main_thread()
        if found and in_save and waiting.ident is None:
            waiting.start()
        return found

    monkeypatch.setattr("iobench.remote.drain.late", exceeds)
    tier = Remote(remote, max_backlog=1e-6, on_backlog="wait")
    with Checkpointer(local, tiers=[tier]) as ckpt:
        assert ckpt.save(state(1, _SMALL), 1).backlog_wait_s == 0.0
        save = ckpt.save(state(2, _SMALL), 2)
        assert held.sent, "it did not wait"
        assert 0 < save.backlog_wait_s <= save.stall_s


def test_a_step_is_removed_and_saved_anew_everywhere(local, remote) -> None:
    """`remove` removes both copies. After a restart from step 1, another step 2 replaces it."""
    with Checkpointer(local, tiers=[Remote(remote)]) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(state(step, _SMALL), step)
        ckpt.wait(until="remote")
        ckpt.remove(3)
        assert ckpt.steps() == [1, 2]
        assert names(remote) == {"step-1", "step-2"}
        ckpt.load(1)
        ckpt.save({**state(2, _SMALL), "again": True}, 2)
        until(lambda: settled(ckpt))
    assert load_checkpoint(remote)["again"] is True
    assert not [name for name in names(remote) if name.endswith(DRAINING_SUFFIX)]


def test_an_outdated_directory(local, remote, tmp_path) -> None:
    """A node with an old copy of the directory takes what another one has saved since, and does
    not replace it in the remote tier."""
    old = tmp_path / "old"
    with Checkpointer(local, tiers=[Remote(remote)]) as ckpt:
        for step in (1, 2):
            ckpt.save(state(step, _SMALL), step)
    shutil.copytree(local, old)
    with Checkpointer(local, tiers=[Remote(remote)]) as ckpt:
        ckpt.load(1)
        ckpt.save({**state(2, _SMALL), "again": True}, 2)
    with Checkpointer(old, tiers=[Remote(remote)]) as ckpt:
        assert ckpt.latest() == 2
        assert ckpt.load()["again"] is True
        assert ckpt.load(2)["again"] is True
        until(lambda: settled(ckpt))
        ckpt.save(state(3, _SMALL), 3)
    assert load_checkpoint(remote, 2)["again"] is True
    assert load_checkpoint(remote)["step"] == 3


def test_the_command(local, remote, iobench_inside) -> None:
    """`iobench tiers` shows both tiers, also while a Checkpointer writes there."""
    with Checkpointer(local, tiers=[Remote(remote)]) as ckpt:
        ckpt.save(state(7, _SMALL), 7)
        until(
            lambda: bool(events(local, "verified"))
        )  # of another process only the journal is read
        shown = iobench_inside("tiers", local)
        found = json.loads(iobench_inside("tiers", local, "--format", "json").stdout)
    assert shown.returncode == 0, shown.stderr
    assert str(remote) in shown.stdout
    assert "verified" in shown.stdout
    assert "what was trained after step 7" in shown.stdout
    (one,) = found["checkpoints"]
    assert (one["step"], one["local"], one["remote"]) == (7, "durable", "verified")
    assert (found["steps_at_risk"], found["backlog_s"]) == (0, 0.0)
    assert (found["directory"], found["remote"]) == (str(local), str(remote))
    refused = iobench_inside("tiers", remote)
    assert refused.returncode == 2
    assert "no Checkpointer has copied" in refused.stderr


def test_wrong_tiers(local) -> None:
    """Told before anything is written."""
    with pytest.raises(OptionError, match="another directory"):
        Checkpointer(local, tiers=[Remote(local)])
    with pytest.raises(OptionError, match="a directory first"):
        Checkpointer("s3://bucket/run", writer="s3", tiers=[Remote(local)])
    assert not local.exists()


@pytest.mark.parametrize(
    "wrong",
    [
        *({"keep": 3}, {"bandwidth_limit": 0}, {"max_backlog": 0}, {"on_backlog": "stop"}),
        *({"on_backlog": "skip"}, {"every_save": True, "on_backlog": "drop"}),
    ],
    ids=str,
)
def test_wrong_options(wrong: dict[str, Any]) -> None:
    """Values out of range are refused at once."""
    with pytest.raises(OptionError):
        Remote("s3://bucket/run", **wrong)


# A bucket.


def _uploads(target: str) -> list[Any]:
    writer = S3Writer(checksum="none")
    try:
        return S3Objects(writer.client, S3Target.parse(target)).uploads()
    finally:
        writer.client.close()


def test_copied_to_a_bucket(bucket, local) -> None:
    """Copied in parts, kept, replaced, removed, restored by another node."""
    writer = S3Writer(part_size="5MiB", threads=2)
    tier = Remote(bucket.target, keep=KeepLast(2), writer=writer)
    with Checkpointer(local, tiers=[tier]) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(state(step), step)
            ckpt.wait(until="remote")
        until(lambda: settled(ckpt))
        assert load_checkpoint(bucket.target, 3, writer=writer)["w"].unique().tolist() == [3]
        ckpt.load(2)
        ckpt.save({**state(3, _SMALL), "again": True}, 3)
        until(lambda: settled(ckpt))
        ckpt.save(state(4, _SMALL), 4)
        until(lambda: settled(ckpt))
        ckpt.remove(4)
    assert load_checkpoint(bucket.target, writer=writer)["again"] is True
    shutil.rmtree(local)
    with Checkpointer(local, tiers=[tier]) as ckpt:
        assert ckpt.load()["again"] is True
        assert torch.equal(ckpt.load()["w"], torch.full((_SMALL,), 3.0))
    assert _uploads(bucket.target) == []
    writer.client.close()
    assert RemoteTier(tier).store.steps() == [3]


def test_memory_tiers_of_a_bucket_read_no_manifest_in_the_trainer(bucket, monkeypatch) -> None:
    """Saves return while the bucket's manifests are read; they are numbered after those."""
    small = {"w": torch.ones(10)}
    with Checkpointer(bucket.target, writer="s3") as ckpt:
        ckpt.save(small, 1)
        ckpt.save(small, 2)
    released, read = threading.Event(), ObjectStore.manifest

    def manifest(*arguments: Any, **options: Any) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        assert released.wait(60)
        return read(*arguments, **options)

    monkeypatch.setattr(ObjectStore, "manifest", manifest)
    with Checkpointer(bucket.target, writer="s3", tiers=[Memory("16MiB")]) as ckpt:
        saves = [ckpt.save_async(small, step) for step in (3, 4)]
        released.set()
        ckpt.wait()
        assert [save.serial for save in saves] == [3, 4]
    monkeypatch.setattr(ObjectStore, "manifest", read)
    store = ObjectStore(bucket.target, S3Writer())
    assert [store.manifest(step).serial for step in store.steps()] == [1, 2, 3, 4]


def test_memory_tiers_of_a_bucket_whose_manifests_cannot_be_read(bucket, monkeypatch) -> None:
    """A failed read costs the save whose turn it was; the others keep their order."""
    small = {"w": torch.ones(10)}
    with Checkpointer(bucket.target, writer="s3") as ckpt:
        ckpt.save(small, 1)
        ckpt.save(small, 2)
    released, calls, read = threading.Event(), itertools.count(), ledger.outlines

    def outlines(*arguments: Any) -> Any:
        assert released.wait(60)
        if next(calls) < 2:  # in the first save, and when the next one is chosen
            raise TransferError("no answer")
        return read(*arguments)

    monkeypatch.setattr(ledger, "outlines", outlines)
    ckpt = Checkpointer(bucket.target, writer="s3", tiers=[Memory("16MiB")])
    saves = [ckpt.save_async(small, step) for step in (3, 4, 5)]
    released.set()
    with pytest.raises(TransferError, match="no answer"):
        ckpt.wait()
    assert [save.status for save in saves] == ["failed", "committed", "committed"]
    saves.append(ckpt.save_async(small, 6))
    ckpt.close()
    store = ObjectStore(bucket.target, S3Writer())
    found = {step: store.manifest(step).serial for step in store.steps()}
    assert found == {1: 1, 2: 2, 4: 4, 5: 5, 6: 6}
    assert next(calls) == 3  # read once when it worked


def _saved(local: Path, remote: Any, what: Any = None) -> None:
    """Save a checkpoint of step 1 to both tiers."""
    with Checkpointer(local, tiers=[Remote(remote)]) as ckpt:
        ckpt.save(state(1) if what is None else what, 1)
        until(lambda: settled(ckpt))


def test_a_copy_of_another_save_does_not_help(local, remote, monkeypatch) -> None:
    """The same step, saved anew: the older copy in the remote tier is not used."""
    _saved(local, remote)
    with Checkpointer(local) as ckpt:
        ckpt.remove(1)
        ckpt.save({**state(1), "again": True}, 1)
    copied, original = threading.Event(), FileCopier.copy

    def send(step: FileCopier, entry: Any) -> int | None:
        assert copied.wait(60)
        return original(step, entry)

    monkeypatch.setattr(FileCopier, "copy", send)
    with Checkpointer(local, tiers=[Remote(remote)]) as ckpt:
        assert ckpt.load()["again"] is True
        assert ckpt.loaded.sources == {str(local): "read"}
        copied.set()


def test_a_later_save_of_another_node_counts(local, remote, monkeypatch) -> None:
    """Its list is waited for, and the older local checkpoint is not returned."""
    _saved(local, remote, state(1, _SMALL))
    with Checkpointer(local.with_name("other"), tiers=[Remote(remote)]) as other:
        other.load()
        other.save(state(2, _SMALL), 2)
    answer, original = threading.Event(), TieredStore._listed

    def listed(asking: TieredStore) -> Any:
        assert answer.wait(60)
        return original(asking)

    monkeypatch.setattr(TieredStore, "_listed", listed)
    with Checkpointer(local, tiers=[Remote(remote)]) as ckpt:
        threading.Timer(0.1, answer.set).start()
        assert ckpt.load()["step"] == 2
        ckpt.save(state(3, _SMALL), 3)
        assert ckpt.latest() == 3
