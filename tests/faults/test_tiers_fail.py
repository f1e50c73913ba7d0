"""Tiers that are full, gone, or refuse: nothing that was told durable is lost, training goes on."""

import errno
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.scripted_s3 import answer, reset, silence
from support.tiers import events, settled, state, until

from iobench import Checkpointer, KeepLast, Remote, load_checkpoint
from iobench.errors import TargetError, TransferError, UnavailableError
from iobench.remote import tiered_store
from iobench.units import MIB
from iobench.writers.s3 import S3Writer

# The drain gives the first in its own thread, at any moment.
pytestmark = pytest.mark.filterwarnings(
    "ignore:copies to:RuntimeWarning", "ignore:.*cannot be asked for checkpoints:RuntimeWarning"
)

_SIZE = 5 * MIB  # elements: 20 MiB


@pytest.mark.root
def test_remote_full(tmp_path, new_filesystem) -> None:
    """The error is told, the local checkpoints stay; when there is room again, it is copied.

    The space of a file is reserved first, so the first attempt has sent nothing.
    """
    root: Path = new_filesystem("ext4", 64 * MIB)
    local, remote = tmp_path / "local", root / "run"
    with Checkpointer(local, keep=KeepLast(1), tiers=[Remote(remote)]) as ckpt:
        ckpt.save(state(1, _SIZE), 1)
        until(lambda: settled(ckpt))
        (root / "filler").write_bytes(bytes(24 * MIB))
        second = ckpt.save(state(2, _SIZE), 2)
        with pytest.raises(TransferError) as caught:
            ckpt.wait(until="remote")
        assert caught.value.errno == errno.ENOSPC
        ckpt.save(state(3, 1000), 3)
        assert {"step-2", "step-3"} <= {path.name for path in local.iterdir()}
        assert ckpt.load(2)["w"].unique().tolist() == [2]
        (root / "filler").unlink()
        until(lambda: settled(ckpt))
        assert second.copies[1].state == "verified"
    assert load_checkpoint(remote, 2)["w"].unique().tolist() == [2]


@pytest.mark.root
def test_local_full(tmp_path, new_filesystem) -> None:
    """While the remote tier does not answer, local copies cannot go: a save gets one clear error.
    It succeeds when the remote tier is back."""
    root: Path = new_filesystem("ext4", 64 * MIB)
    local, remote = root / "run", tmp_path / "remote"
    with Checkpointer(local, keep=KeepLast(1), tiers=[Remote(remote)]) as ckpt:
        ckpt.save(state(0, 1000), 0)
        until(lambda: settled(ckpt))
        remote.rename(tmp_path / "away")
        remote.write_text("a file in the way")
        ckpt.save(state(1, _SIZE), 1)
        ckpt.save(state(2, _SIZE), 2)
        with pytest.raises(TransferError) as caught:
            ckpt.save(state(3, _SIZE), 3)
        assert caught.value.errno == errno.ENOSPC
        assert ckpt.latest() == 2
        assert ckpt.load()["w"].unique().tolist() == [2]
        remote.unlink()
        (tmp_path / "away").rename(remote)
        until(lambda: settled(ckpt))
        ckpt.save(state(4, 1000), 4)
        ckpt.save(state(5, _SIZE), 5)
    assert {path.name for path in remote.iterdir() if path.name.startswith("step")} == {
        f"step-{step}" for step in (0, 1, 2, 4, 5)
    }


def test_local_disk_removed(tmp_path) -> None:
    """A save says that the directory is gone. What is in the remote tier stays."""
    local, remote = tmp_path / "local", tmp_path / "remote"
    ckpt = Checkpointer(local, tiers=[Remote(remote)])
    ckpt.save(state(1, 1000), 1)
    until(lambda: settled(ckpt))
    shutil.rmtree(local)
    with pytest.raises(TargetError, match="removed or replaced"):
        ckpt.save(state(2, 1000), 2)
    ckpt.close()
    with Checkpointer(local, tiers=[Remote(remote)]) as ckpt:
        assert ckpt.load()["step"] == 1


def test_the_clock_is_set_back(tmp_path, monkeypatch) -> None:
    """By a year: nothing is dropped, and the last save is the newest."""
    local, remote = tmp_path / "local", tmp_path / "remote"
    with Checkpointer(local, tiers=[Remote(remote, max_backlog="10min")]) as ckpt:
        ckpt.save(state(1, 1000), 1)
        until(lambda: settled(ckpt))
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() - 3.2e7)
        ckpt.save(state(2, 1000), 2)
        until(lambda: settled(ckpt))
        assert ckpt.latest() == 2
    with Checkpointer(local, tiers=[Remote(remote, max_backlog="10min")]) as ckpt:
        until(lambda: settled(ckpt))
        assert ckpt.load()["step"] == 2
    assert load_checkpoint(remote)["step"] == 2
    assert not events(local, "dropped")


@pytest.mark.parametrize(
    "fault",
    [answer(503, "SlowDown"), answer(400, "ExpiredToken"), reset],
    ids=["503", "400", "cut"],
)
def test_a_bucket_is_gone_in_mid_drain(fault, server, tmp_path) -> None:
    """Each attempt fails for a while. The state told is true, restores go on from the local tier,
    and the copy is complete at the end."""
    writer = S3Writer(endpoint_url=server.endpoint_url, addressing_style="path", max_attempts=1)
    local = tmp_path / "local"
    with Checkpointer(local, tiers=[Remote("s3://bucket/run", writer=writer)]) as ckpt:
        ckpt.save(state(1, 1000), 1)
        until(lambda: settled(ckpt))
        server.fail("put", fault, times=3)
        save = ckpt.save(state(2, 1000), 2)
        with pytest.raises((TransferError, UnavailableError)):
            ckpt.wait(until="remote")
        assert save.copies[1].state in ("waiting", "draining")
        assert not any("step-2/manifest" in key for key in server.objects)
        assert ckpt.load()["step"] == 2
        until(lambda: settled(ckpt))
        assert save.copies[1].state == "verified"
    assert len(events(local, "failed")) >= 2
    assert load_checkpoint("s3://bucket/run", writer=writer)["step"] == 2
    writer.client.close()


class _SimulatedPauses(threading.Event):
    """The event on which the drain waits between attempts: the time of a pause only counts."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses_s: list[float] = []

    @property
    def passed_s(self) -> float:
        return sum(self.pauses_s)

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is None or timeout < 0.2:  # of the rate, or for a save
            return super().wait(timeout)
        self.pauses_s.append(timeout)
        return super().wait(0.001)


def test_a_bucket_that_is_gone_for_an_hour(server, tmp_path, monkeypatch) -> None:
    """It goes in the middle of a copy. Training goes on, attempts become rare, no local checkpoint
    is removed, and every one is copied when the bucket is back."""
    writer = S3Writer(endpoint_url=server.endpoint_url, addressing_style="path", max_attempts=1)
    local, simulated = tmp_path / "local", _SimulatedPauses()
    remote = Remote("s3://bucket/run", writer=writer, max_backlog="3h")
    with Checkpointer(local, keep=KeepLast(1), tiers=[remote]) as ckpt:
        ckpt.save(state(1, 1000), 1)
        until(lambda: settled(ckpt))
        monkeypatch.setattr(ckpt._tier.drain._limit, "stop", simulated)
        clock = SimpleNamespace(
            time=time.time, monotonic=lambda: time.monotonic() + simulated.passed_s
        )
        monkeypatch.setattr("iobench.remote.drain.time", clock)
        server.fail("put", reset, times=10**6, after=1)  # the first of its files is sent
        for operation in ("list", "head", "get", "delete", "remove", "pending"):
            server.fail(operation, reset, times=10**6)
        saves = []
        for step in (2, 3, 4):
            saves.append(ckpt.save(state(step, 1000), step))
            until(lambda: simulated.passed_s > 1200 * len(saves))
        assert max(simulated.pauses_s) <= 300
        assert len(simulated.pauses_s) < 60
        assert {save.copies[1].state for save in saves} <= {"waiting", "draining"}
        assert not [key for key in server.objects if "manifest" in key and "step-1/" not in key]
        assert {"step-2", "step-3", "step-4"} <= {path.name for path in local.iterdir()}
        assert ckpt.load()["step"] == 4
        server.forget_faults()
        until(lambda: settled(ckpt))
        assert [save.copies[-1].state for save in saves] == ["verified"] * 3
    for step in (2, 3, 4):
        assert load_checkpoint("s3://bucket/run", step, writer=writer)["step"] == step
    writer.client.close()


def test_new_credentials(rclone, tmp_path, monkeypatch) -> None:
    """A restart with credentials that the server refuses: the copy is made as soon as there are new
    ones, without another restart."""
    file, local = tmp_path / "credentials", tmp_path / "local"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))

    def use(key: str, secret: str) -> None:
        file.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")

    use(rclone.access_key, rclone.secret_key)
    target = f"{rclone.target}/run"
    with Checkpointer(local, tiers=[Remote(target)]) as ckpt:
        ckpt.save(state(1, 1000), 1)
        until(lambda: settled(ckpt))
    use("AKIDEXPIRED", "of yesterday")
    with Checkpointer(local, tiers=[Remote(target)]) as ckpt:
        until(lambda: ckpt._tier.drain.failure is not None)
        save = ckpt.save(state(2, 1000), 2)
        with pytest.raises((TransferError, UnavailableError)):
            ckpt.wait(until="remote")
        assert [one.state for one in save.copies] == ["durable", "waiting"]
        use(rclone.access_key, rclone.secret_key)
        until(lambda: settled(ckpt))
        assert save.copies[1].state == "verified"
    assert load_checkpoint(target, writer="s3")["step"] == 2


def test_a_server_that_hangs(server, tmp_path, monkeypatch) -> None:
    """It takes requests and answers none: neither the start nor a restore waits for it."""
    writer = S3Writer(endpoint_url=server.endpoint_url, addressing_style="path", max_attempts=1)
    local, tiers = tmp_path / "local", [Remote("s3://bucket/run", writer=writer)]
    with Checkpointer(local, tiers=tiers) as ckpt:
        ckpt.save(state(1, 1000), 1)
        until(lambda: settled(ckpt))
    for operation in ("list", "get", "head", "pending"):
        server.fail(operation, silence, times=1000)
    monkeypatch.setattr(tiered_store, "_ANSWER_S", 3600.0)
    ckpt = Checkpointer(local, tiers=tiers)
    monkeypatch.setattr(tiered_store, "_ANSWER_S", 0.0)
    with pytest.warns(RuntimeWarning, match="cannot be asked"):
        assert ckpt.load()["step"] == 1
    assert ckpt.loaded.sources == {str(local): "read"}
    ckpt.save(state(2, 1000), 2)
    assert not server.released.is_set()
    server.forget_faults()
    server.released.set()
    until(lambda: settled(ckpt))
    ckpt.close()
    assert load_checkpoint("s3://bucket/run", writer=writer)["step"] == 2
    writer.client.close()
