"""Placement of a Checkpointer: saves that go to the remote tier directly."""

import json
import secrets
import shutil
import threading
import warnings
from typing import Any

import pytest
from support.scripted_s3 import scripted_s3, silence
from support.tiers import events, names, settled, state, until

from iobench import Checkpointer, KeepLast, Placement, Remote, load_checkpoint
from iobench.checkpoint.manifest import MANIFEST
from iobench.checkpoint.save import Copy
from iobench.errors import OptionError, TransferError
from iobench.remote.drain import Drain
from iobench.remote.file_copier import FileCopier
from iobench.remote.placement import LOCAL, REMOTE
from iobench.remote.remote_copy import DirectoryCopy
from iobench.units import MIB
from iobench.writers.image import FileImage
from iobench.writers.s3 import S3Writer
from iobench.writers.s3_store.objects import S3Objects
from iobench.writers.s3_store.target import S3Target
from iobench.writers.s3_store.upload import S3Upload

# The drain gives it in its own thread, at any moment.
pytestmark = pytest.mark.filterwarnings("ignore:copies to:RuntimeWarning")

_SMALL = 100_000


def _open(ckpt: Checkpointer) -> None:
    """Wait until the remote tier is open."""
    tier = ckpt._tier
    until(lambda: tier.remote.is_open)


def _measured(ckpt: Checkpointer, faster: str, size: int = 10**6) -> None:
    """Add transfers of `size` bytes that show which tier is faster."""
    for _ in range(3):
        ckpt._tier.rates.add(LOCAL, size, 1.0 if faster == LOCAL else 9.0)
        ckpt._tier.rates.add(REMOTE, size, 1.0 if faster == REMOTE else 9.0)


def _options(**more: object) -> Placement:
    return Placement(**more)  # type: ignore[arg-type]  # options of Placement


def test_to_the_faster_tier(local, remote, iobench_inside) -> None:
    """A save goes where the measured throughput says; the manifest has why."""
    with Checkpointer(local, tiers=[Remote(remote)], placement=_options()) as ckpt:
        _open(ckpt)
        first = ckpt.save(state(1, _SMALL), 1)
        until(lambda: settled(ckpt))
        _measured(ckpt, REMOTE)
        second = ckpt.save_async(state(2, _SMALL), 2)
        ckpt.wait()
        assert second.status == "committed"
        assert first.copies[0] == Copy(tier=str(local), state="durable")
        assert second.copies == [Copy(tier=str(remote), state="durable")]
        assert ckpt.latest() == 2
        assert ckpt.load()["step"] == 2
        assert ckpt.loaded.sources == {str(remote): "read"}
        shown = iobench_inside("tiers", local).stdout
        assert shown.startswith("if this node dies now, lost: ")
        assert f"\nlocal   {local}\nremote  {remote}\n" in shown
        assert "what was trained after step 2" in shown
        ckpt.remove(2)
        assert ckpt.steps() == [1]
        _measured(ckpt, LOCAL)
        _measured(ckpt, LOCAL)
        ckpt.save(state(3, _SMALL), 3)
    assert names(local) == {"step-1", "step-3"}
    assert names(remote) == {"step-1", "step-3"}
    assert [one.step for one in events(local, "saved")] == [1, 3]
    manifest = json.loads((local / "step-3" / "manifest.json").read_text())
    assert manifest["writer"]["placement"].startswith("local takes")
    assert load_checkpoint(local)["step"] == 3


@pytest.mark.parametrize(("do", "before"), [("send", True), ("send", False), ("read back", True)])
def test_a_copy_that_meets_a_new_save(do, before, local, remote, monkeypatch) -> None:
    """A step is removed while it is copied or read back, and saved anew directly: that save stays,
    though its bytes are others."""
    held, go_on, original = threading.Event(), threading.Event(), FileCopier._together

    def hold(self: FileCopier, order: Any, *args: Any) -> Any:
        if held.is_set() or order["do"] != do:
            return original(self, order, *args)
        found = None if before else original(self, order, *args)
        held.set()
        assert go_on.wait(60)
        return original(self, order, *args) if before else found

    monkeypatch.setattr(FileCopier, "_together", hold)
    with Checkpointer(local, tiers=[Remote(remote)], placement=_options()) as ckpt:
        _open(ckpt)
        ckpt.save(state(1, _SMALL), 2)
        assert held.wait(60)
        ckpt.remove(2)
        _measured(ckpt, REMOTE)
        second = ckpt.save(state(7, _SMALL), 2)
        assert second.copies == [Copy(tier=str(remote), state="durable")]
        go_on.set()
        _measured(ckpt, LOCAL)
        _measured(ckpt, LOCAL)
        ckpt.save(state(3, _SMALL), 3)
        until(lambda: settled(ckpt))
        assert ckpt.steps() == [2, 3]
        assert second.copies == [Copy(tier=str(remote), state="durable")]
        assert ckpt.load(2)["step"] == 7
    assert names(remote) == {"step-2", "step-3"}
    assert load_checkpoint(remote, 2)["step"] == 7


def test_a_dead_remote_tier_is_left_at_once(local, remote, monkeypatch) -> None:
    """The same checkpoint is written to the local tier; the next one goes there without a try."""
    tries: list[object] = []
    with Checkpointer(local, tiers=[Remote(remote)], placement=_options()) as ckpt:
        _open(ckpt)
        _measured(ckpt, REMOTE)
        broken = ckpt._tier.remote.writer

        def fail(*_: object, **__: object) -> None:
            tries.append(1)
            raise TransferError(5, "Input/output error", str(remote))

        monkeypatch.setattr(broken, "write_many", fail)
        with pytest.warns(RuntimeWarning, match="step 1 is written to"):
            ckpt.save(state(1, _SMALL), 1)
        monkeypatch.undo()
        monkeypatch.setattr(DirectoryCopy, "send", fail)
        ckpt.save(state(2, _SMALL), 2)
        assert names(local) == {"step-1", "step-2"}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            monkeypatch.undo()
            until(lambda: settled(ckpt))
    assert len(tries) >= 1
    assert names(remote) == {"step-1", "step-2"}
    assert [one.step for one in events(local, "saved")] == [1, 2]


def test_a_dead_bucket_is_left_without_a_clean_up(local, rclone, monkeypatch) -> None:
    """Requests that abort and delete would have to time out too. The parts that were sent are used
    by the copy, and no upload is left."""
    target = f"{rclone.target}/run-{secrets.token_hex(4)}"
    send, asked = S3Upload.send, []

    def fail(upload: S3Upload, number: int, *rest: Any) -> None:
        if number > 1:
            raise TransferError(110, "Connection timed out", target)
        send(upload, number, *rest)

    def tidy_after(drain: Drain) -> None:  # else the parts may go before the copy is queued
        if drain.queue.get(1) is not None:
            tidy(drain)

    tier, tidy = Remote(target, writer=S3Writer(part_size="5MiB", threads=1)), Drain._tidy
    with Checkpointer(local, tiers=[tier], placement=_options(goal="capacity")) as ckpt:
        _open(ckpt)
        monkeypatch.setattr(Drain, "_tidy", tidy_after)
        monkeypatch.setattr(S3Upload, "send", fail)
        monkeypatch.setattr(S3Upload, "abort", lambda _: asked.append("abort"))
        monkeypatch.setattr(S3Objects, "delete", lambda *_: asked.append("delete"))
        with pytest.warns(RuntimeWarning, match="step 1 is written to"):
            save = ckpt.save(state(1, 3_000_000), 1)
        assert asked == []
        assert save.copies[0] == Copy(tier=str(local), state="durable")
        monkeypatch.undo()
        until(lambda: settled(ckpt))
    sent = next(one for one in events(local, "durable") if one.step == 1)
    assert 0 < sent.sent_bytes <= sent.size_bytes - 5 * MIB
    writer = S3Writer()
    assert S3Objects(writer.client, S3Target.parse(target)).uploads() == []
    writer.client.close()
    assert load_checkpoint(target, writer="s3")["step"] == 1


@pytest.mark.parametrize("operation", ["list", "put"])
@pytest.mark.usefixtures("rclone")  # its credentials
def test_a_server_that_does_not_answer(local, operation: str) -> None:
    """A direct save does not wait for the timeouts of its writer, which are an hour here: after
    the expected time and that of a local save the checkpoint is written to the local tier."""
    with scripted_s3() as silent:
        writer = S3Writer(
            endpoint_url=silent.endpoint_url, addressing_style="path", read_timeout_s=3600
        )
        tier = Remote("s3://bucket/run", writer=writer)
        with Checkpointer(local, tiers=[tier], placement=_options()) as ckpt:
            _open(ckpt)
            _measured(ckpt, REMOTE, size=10**9)
            silent.fail(operation, silence, times=1000)
            with pytest.warns(RuntimeWarning, match="not written within .* the expected time"):
                save = ckpt.save(state(1, _SMALL), 1)
            assert save.copies[0] == Copy(tier=str(local), state="durable")
            silent.forget_faults()
            silent.released.set()
            until(lambda: settled(ckpt))
            assert load_checkpoint("s3://bucket/run", writer=writer)["step"] == 1


def test_a_direct_save_whose_manifest_is_in_doubt_is_taken_back(local, rclone, monkeypatch) -> None:
    """The answer to its last request is lost: the bucket may show a checkpoint that counts as
    failed. So it is deleted before the save goes elsewhere."""
    target = f"{rclone.target}/run-{secrets.token_hex(4)}"
    write, delete, deleted = S3Writer.write, S3Objects.delete, list[str]()

    def lose(writer: S3Writer, image: FileImage, *rest: Any, **how: Any) -> Any:
        done = write(writer, image, *rest, **how)
        if image.path == MANIFEST and not deleted:
            raise TransferError(110, "Connection timed out", target)
        return done

    def note(objects: S3Objects, keys: list[str]) -> None:
        deleted.extend(keys)
        delete(objects, keys)

    with Checkpointer(local, tiers=[Remote(target)], placement=_options(goal="capacity")) as ckpt:
        _open(ckpt)
        monkeypatch.setattr(S3Writer, "write", lose)
        monkeypatch.setattr(S3Objects, "delete", note)
        with pytest.warns(RuntimeWarning, match="step 1 is written to"):
            ckpt.save(state(1, _SMALL), 1)
        assert any(key.endswith(MANIFEST) for key in deleted)
        until(lambda: settled(ckpt))
    assert load_checkpoint(target, writer="s3")["step"] == 1


def test_to_a_bucket(local, rclone) -> None:
    """Direct saves and copies in one bucket, in turn, obey its retention. A restart goes back and
    replaces a step. A node with an empty directory restores it."""
    target = f"{rclone.target}/run-{secrets.token_hex(4)}"
    tier = Remote(target, keep=KeepLast(2))
    with Checkpointer(local, tiers=[tier], placement=_options(goal="capacity")) as ckpt:
        _open(ckpt)
        for step in (1, 2, 3):
            assert ckpt.save(state(step, _SMALL), step).copies[0].tier == target
        assert ckpt.steps() == [2, 3]
        ckpt.load(2)
        ckpt.save({**state(3, _SMALL), "again": True}, 3)
    assert names(local) == set()
    shutil.rmtree(local)
    with Checkpointer(local, tiers=[tier], placement=_options(goal="bandwidth")) as ckpt:
        assert ckpt.load()["again"] is True
        ckpt.save(state(4, _SMALL), 4)
        until(lambda: settled(ckpt))
        assert ckpt.steps() == [3, 4]
    assert names(local) == {"step-4"}
    assert load_checkpoint(target, writer="s3")["step"] == 4


def test_a_step_that_the_local_tier_has_is_replaced_there(local, remote) -> None:
    """Otherwise each tier would have another save of the same step."""
    with Checkpointer(local, tiers=[Remote(remote)], placement=_options()) as ckpt:
        _open(ckpt)
        for step in (1, 2):
            ckpt.save(state(step, _SMALL), step)
        until(lambda: settled(ckpt))
        ckpt.load(1)
        _measured(ckpt, REMOTE)
        ckpt.save({**state(2, _SMALL), "again": True}, 2)
        assert ckpt.load()["again"] is True
    assert load_checkpoint(local)["again"] is True
    assert load_checkpoint(remote)["again"] is True


def test_a_copy_that_waits_for_saves_is_measured(local, remote) -> None:
    """Without its pauses. Otherwise frequent local saves would hide the rate of the remote tier."""
    with Checkpointer(local, tiers=[Remote(remote)], placement=_options()) as ckpt:
        _open(ckpt)
        drain = ckpt._tier.drain
        with drain.saving():
            save = ckpt.save(state(1, _SMALL), 1)
            until(lambda: drain._limit.yielded_s > 0.1)
            assert save.copies[1].state == "draining"
        until(lambda: bool(ckpt._tier and ckpt._tier.rates.seen[REMOTE]))
        (copy,) = events(local, "durable")
        (seen,) = ckpt._tier.rates.seen[REMOTE]
        assert copy.elapsed_s == pytest.approx(seen.elapsed_s)
        assert seen.size_bytes == copy.sent_bytes >= 4 * _SMALL


def test_options(local, remote) -> None:
    """A placement needs a remote tier."""
    with pytest.raises(OptionError, match="needs tiers"):
        Checkpointer(local, placement=Placement())
    with pytest.raises(OptionError, match="Placement"):
        Checkpointer(local, tiers=[Remote(remote)], placement="durable")  # type: ignore[arg-type]  # wrong on purpose
