"""A signal handler that saves, or a finalizer, enters a function that its own thread is in."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.fake_device import FakeDevice
from support.reentry import at_every_collection, everywhere

from iobench.integrations import default_writer
from iobench.integrations.redirect import call_counts
from iobench.integrations.redirect.call_counts import CallCounts, Count, merged
from iobench.writers.base import Writer
from iobench.writers.blocks import workers
from iobench.writers.blocks.channel import Channel, Lease
from iobench.writers.blocks.workers import BlockPool
from iobench.writers.device import staging
from iobench.writers.image import Bytes
from iobench.writers.local import deferred_free, new_file
from iobench.writers.s3_store import client as s3_client
from iobench.writers.s3_store.client import S3Client, S3Options

_POOL_ENTRIES = pytest.mark.parametrize("entry", ["give", "take", "take and give"])


def _pool_entry(entry: str, pool: BlockPool, spare: Bytes, got: list[Bytes]) -> Callable[[], None]:
    """Return what a finalizer does: it gives `spare` back, or takes a block into `got`."""

    def enters() -> None:
        if entry == "give":
            pool.give(spare)
            return
        got.append(pool.take())
        if entry == "take and give":
            pool.give(got.pop())

    return enters


@_POOL_ENTRIES
@pytest.mark.parametrize("kept", [0, 1])
def test_block_pool(entry: str, kept: int) -> None:
    """No block is used twice or lost, at any point where a finalizer returns one."""

    def check(enter: Callable[..., bool]) -> bool:
        pool, got = BlockPool(1 << 20), list[Bytes]()
        spare = pool.take()
        pool._free.clear()
        for block in [pool._make()[0] for _ in range(kept)]:
            pool.give(block)

        there = enter(lambda: got.append(pool.take()), _pool_entry(entry, pool, spare, got))
        free = [block.ctypes.data for block in pool._free]
        out = [block.ctypes.data for block in got]
        assert len(set(free + out)) == len(free + out)
        assert len(out) == (2 if entry == "take" and there else 1)
        if entry == "give" and there:
            assert spare.ctypes.data in free + out
        return there

    everywhere(workers, check)


def test_pinned_blocks() -> None:
    """The same for pinned blocks."""

    def check_pinned(enter: Callable[..., bool]) -> bool:
        device, got = FakeDevice(), list[Bytes]()

        def take() -> None:
            got.append(staging._pool(device, 5000).take())

        there = enter(take, take)
        assert len({block.ctypes.data for block in got}) == len(got) == 1 + there
        return there

    everywhere(staging, check_pinned)


def test_default_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both get a writer, and the next one gets what the process keeps."""

    def check(enter: Callable[..., bool]) -> bool:
        monkeypatch.setattr(default_writer, "_default", None)
        got = list[Writer]()
        there = enter(
            lambda: got.append(default_writer.chosen_writer()),
            lambda: got.append(default_writer.chosen_writer()),
        )
        assert default_writer.chosen_writer() in got
        assert [one.name for one in got] == ["hybrid"] * (1 + there)
        return there

    everywhere(default_writer, check)


def test_call_counts(tmp_path: Path) -> None:
    """Each call is counted once, and the file is whole."""

    def check(enter: Callable[..., bool]) -> bool:
        for path in tmp_path.iterdir():
            path.unlink()
        counts = CallCounts(tmp_path)
        counts.add("f", "stock", Count(calls=1, bytes=1), reason="before")
        there = enter(
            lambda: counts.add("f", "stock", Count(calls=1, bytes=10), reason="new"),
            lambda: counts.add("g", "stock", Count(calls=1, bytes=100), reason="in a handler"),
        )
        functions, problems, processes = merged(tmp_path)
        (path,) = tmp_path.iterdir()
        assert len(path.read_text().splitlines()) == 2 + there
        assert (problems, processes) == ([], 1)
        assert functions["f"].stock["before"] == Count(calls=1, bytes=1)
        if there:
            assert functions["g"].stock == {"in a handler": Count(calls=1, bytes=100)}
        assert functions["f"].stock["new"] == Count(calls=1, bytes=10)
        return there

    everywhere(call_counts, check)


def test_a_handler_that_ends_the_process_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It saves and raises SystemExit when the line of another call has just been written."""
    counts, write = CallCounts(tmp_path), os.write

    def preempted(fd: int, line: bytes) -> int:
        monkeypatch.setattr(os, "write", write)
        write(fd, line)
        counts.add("in a handler", "redirected", Count(calls=1))
        raise SystemExit

    monkeypatch.setattr(os, "write", preempted)
    with pytest.raises(SystemExit):
        counts.add("f", "redirected", Count(calls=1))
    functions, _, _ = merged(tmp_path)
    assert {name: entry.redirected.calls for name, entry in functions.items()} == {
        "f": 1,
        "in a handler": 1,
    }


def test_s3_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both get the same client, and one that was made for nothing is closed."""

    class Made:
        def __init__(self) -> None:
            made.append(self)
            self.closed = False

        def close(self) -> None:
            self.closed = True

    def _make(_: S3Client) -> Made:
        return Made()

    made: list[Made] = []
    monkeypatch.setattr(S3Client, "_make", _make)

    def check(enter: Callable[..., bool]) -> bool:
        made.clear()
        client, got = S3Client(S3Options()), list[Any]()
        there = enter(lambda: got.append(client.boto3), lambda: got.append(client.boto3))
        assert {one.closed for one in got} == {False}
        assert all(one is got[0] for one in got)
        assert [one.closed for one in made].count(False) == 1
        return there

    everywhere(s3_client, check)


def test_leases_of_a_channel() -> None:
    """A lease ends in another thread while the leases are looked through."""

    def check() -> tuple[Callable[[], object], Callable[[], object]]:
        channel: Channel[int] = Channel(lambda: None, name="test", limit=99)
        leases = [Lease(number) for number in range(50)]
        for lease in leases:
            channel.reserve(lease)
        return lambda: channel.holds(leases[0]), lambda: channel.give_back(leases[9])

    at_every_collection(check)


def test_held_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread unmaps a file while the held ones are counted."""
    path = tmp_path / "file"
    path.write_bytes(b"0" * 10)
    monkeypatch.setattr(deferred_free, "_LARGE", 1)
    monkeypatch.setattr(deferred_free.linux, "file_system_type", lambda _: deferred_free._EXT)

    def check() -> tuple[Callable[[], object], Callable[[], object]]:
        others = [(-number, 1) for number in range(50)]
        monkeypatch.setattr(deferred_free, "_held", list(others))

        def hold() -> None:
            with deferred_free.freed_later([path]):
                assert deferred_free._held[-1][0] > 0
            deferred_free.wait()

        return hold, lambda: deferred_free._held.remove(others[9])

    at_every_collection(check)


def test_new_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread makes a directory while one is synced."""

    def check() -> tuple[Callable[[], object], Callable[[], object]]:
        made = {str(tmp_path / str(number)) for number in range(50)}
        monkeypatch.setattr(new_file, "_unsynced", made)
        return lambda: new_file.sync_directory(tmp_path), lambda: made.add(str(tmp_path / "new"))

    at_every_collection(check)
