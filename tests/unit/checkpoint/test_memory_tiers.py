"""Memory tiers: snapshots wait in DRAM, then in slower memory, until storage has them."""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from iobench import (
    Checkpointer,
    KeepLast,
    Memory,
    Placement,
    Remote,
    linux,
    load_checkpoint,
)
from iobench.checkpoint.save import Copy, Save
from iobench.errors import OptionError, StateError
from iobench.remote.memory import MemoryPool, MemorySlot, MemoryTier
from iobench.units import MIB

_SHARED = Path("/dev/shm")
pytestmark = pytest.mark.skipif(not _SHARED.is_dir(), reason="there is no tmpfs at /dev/shm")

_SLOW = f"memory of {_SHARED}"


def _state(step: int) -> dict[str, Any]:
    """A snapshot of it takes 1 MiB, in whole pages."""
    return {"w": torch.full((261_900,), float(step)), "step": step}


@pytest.fixture
def saving(runs: Path, gated: Any) -> Callable[..., Any]:
    """Opens Checkpointers whose writes the test lets go, and lets all go at its end."""

    @contextmanager
    def opened(*tiers: Any, **options: Any) -> Iterator[Checkpointer]:
        with Checkpointer(runs / "a", writer=gated, tiers=tiers, **options) as ckpt:
            try:
                yield ckpt
            finally:
                gated.let(1000)

    return opened


def _two(fast: str = "2MiB", slow: str = "3MiB") -> list[Memory]:
    return [Memory(fast), Memory(slow, path=_SHARED)]


def _states(saves: list[Save]) -> list[str]:
    return [save.status for save in saves]


def _mapped_bytes() -> int:
    """Bytes of files on tmpfs without a name that this process maps."""
    found = [
        re.match(r"(\w+)-(\w+) .* /dev/shm/#\d+ \(deleted\)$", line)
        for line in Path("/proc/self/maps").read_text().splitlines()
    ]
    return sum(int(one[2], 16) - int(one[1], 16) for one in found if one)


def test_as_many_snapshots_wait_as_memory_holds(runs: Path, saving: Any, gated: Any) -> None:
    """DRAM first, then the slower memory; none is dropped, and the oldest one is written first."""
    with saving(*_two(), on_full="skip") as ckpt:
        saves = [ckpt.save_async(_state(step), step) for step in range(7)]
        gated.begun.acquire()
        assert _states(saves) == ["writing", *["waiting"] * 4, "skipped", "skipped"]
        where = [save.copies[0].tier if save.copies else "" for save in saves]
        assert where == ["memory", "memory", _SLOW, _SLOW, _SLOW, "", ""]
        fast, slow = ckpt.memory
        assert (fast.free_bytes, slow.free_bytes) == (0, 0)
        order = []
        for _ in range(5):
            (writing,) = [save for save in saves if save.status == "writing"]
            order.append(writing.step)
            gated.let()
            if len(order) < 5:
                assert gated.begun.acquire(timeout=60)
        assert order == [0, 1, 2, 3, 4]
        ckpt.wait()
        assert _states(saves[:5]) == ["committed"] * 5
        assert ckpt.steps() == [0, 1, 2, 3, 4]
        assert ckpt.latest() == 4
    with Checkpointer(runs / "a") as ckpt:
        assert ckpt.latest() == 4
        for step in range(5):
            state = ckpt.load(step)
            assert state["w"].unique().tolist() == [step]


def test_one_snapshot_is_in_one_memory(saving: Any, gated: Any) -> None:
    """What is left of the first memory takes no part of one; the count is that of whole ones."""
    with saving(*_two("1536KiB", "1536KiB"), on_full="skip") as ckpt:
        saves = [ckpt.save_async(_state(step), step) for step in (1, 2, 3)]
        where = [save.copies[0].tier if save.copies else "" for save in saves]
        assert where == ["memory", _SLOW, ""]
        assert [one.free_bytes for one in ckpt.memory] == [0, 0]
        gated.let(2)
        ckpt.wait()
        for step in (1, 2):
            assert torch.equal(ckpt.load(step)["w"], _state(step)["w"])


@pytest.mark.parametrize(
    ("tiers", "statuses", "steps"),
    [
        (_two(), ["waiting", "waiting", "waiting"], [0, 1, 2, 3]),
        ([Memory("2MiB")], ["dropped", "dropped", "waiting"], [0, 3]),
    ],
)
def test_the_newest_first(
    saving: Any, gated: Any, tiers: list[Memory], statuses: list[str], steps: list[int]
) -> None:
    """A trainer that drops old snapshots waits for nothing. It gets the newest one written first,
    and all others that memory holds too."""
    with saving(*tiers, on_full="drop") as ckpt:
        ckpt.save_async(_state(0), 0)
        assert gated.begun.acquire(timeout=60)
        saves = [ckpt.save_async(_state(step), step) for step in (1, 2, 3)]
        assert _states(saves) == statuses
        assert not any(save.copies for save in saves if save.status == "dropped")
        gated.let()
        assert gated.begun.acquire(timeout=60)
        assert saves[-1].status == "writing"
        gated.let(3)
        ckpt.wait()
        assert ckpt.steps() == steps


def test_what_retention_would_remove_is_not_written(runs: Path, saving: Any, gated: Any) -> None:
    """With KeepLast(2) and three that wait, the oldest is dropped."""
    with saving(Memory("8MiB"), keep=KeepLast(2)) as ckpt:
        saves = [ckpt.save_async(_state(step), step) for step in range(4)]
        gated.let(4)
        ckpt.wait()
        assert _states(saves) == ["committed", "dropped", "committed", "committed"]
        assert ckpt.steps() == [2, 3]
        assert saves[1].copies == []


def test_copies_and_loads_from_memory(runs: Path, expect_same: Callable[[Any, Any], None]) -> None:
    """A committed checkpoint is read from memory until another snapshot takes it."""
    local = Copy(tier=str(runs / "a"), state="durable")
    state = {**_state(1), "more": [torch.ones(3, 2, dtype=torch.bfloat16), b"x", None]}
    with Checkpointer(runs / "a", tiers=[Memory("1100KiB")]) as ckpt:
        save = ckpt.save_async(state, 1)
        ckpt.wait()
        assert save.copies == [Copy(tier="memory", state="volatile"), local]
        for _ in range(2):
            loaded = ckpt.load()
            expect_same(state, loaded)
            loaded["w"].zero_()  # not the memory itself
            assert ckpt.loaded is not None
            assert ckpt.loaded.sources == {"memory": "read"}
        later = ckpt.save_async(_state(2), 2)
        ckpt.wait()
        assert save.copies == [local]
        assert later.copies[0].tier == "memory"
        expect_same(state, ckpt.load(1))
        assert ckpt.loaded is not None
        assert ckpt.loaded.sources == {str(runs / "a"): "read"}
        ckpt.remove(2)
        assert ckpt.load()["step"] == 1
        synchronous = ckpt.save(_state(3), 3)
        assert synchronous.copies == [Copy(tier=str(runs / "a"), state="durable")]
        assert ckpt.load()["step"] == 3


@pytest.mark.parametrize("goal", [None, "capacity"])
def test_memory_before_local_and_remote(runs: Path, goal: Any) -> None:
    """Every snapshot gets to both tiers, in any order; `capacity` sends them there directly."""
    placement = Placement(goal=goal) if goal else None
    tiers = [*_two(), Remote(runs / "remote")]
    with Checkpointer(runs / "a", tiers=tiers, placement=placement) as ckpt:
        ckpt.save(_state(0), 0)
        ckpt.wait(until="remote")  # the remote tier is open
        saves = [ckpt.save_async(_state(step), step) for step in range(1, 6)]
        ckpt.wait(until="remote")
        assert saves[4].copies[0].state == "volatile"
        there = {str(runs / "remote")} | ({str(runs / "a")} if goal is None else set())
        assert {copy.tier for save in saves for copy in save.copies} >= there
        assert ckpt.load()["step"] == 5
        assert ckpt.loaded is not None
        assert ckpt.loaded.sources == {saves[4].copies[0].tier: "read"}
        assert ckpt.latest() == 5
    for step in range(6):
        assert load_checkpoint(runs / "remote", step)["w"].unique().tolist() == [step]


def test_damaged_memory_is_not_read(runs: Path) -> None:
    """A damaged piece is read from storage, a warning says so, and memory is not tried again."""
    with Checkpointer(runs / "a", tiers=[Memory("2MiB")]) as ckpt:
        ckpt.save_async(_state(1), 1)
        ckpt.wait()
        assert ckpt._memory is not None
        (slot,) = ckpt._memory.pool.slots()
        slot.memory[500_000] ^= 1
        with pytest.warns(RuntimeWarning, match="step 1 is read from .*/a in part: .*1 checksums"):
            state = ckpt.load()
        assert torch.equal(state["w"], _state(1)["w"])
        assert ckpt.loaded is not None
        memory, storage = ckpt.loaded.sources.items()
        assert memory[0] == "memory"
        assert "damaged" in memory[1]
        assert storage == (str(runs / "a"), "read 1023.05 KiB")
        ckpt.load()
        assert ckpt.loaded.sources == {str(runs / "a"): "read"}


def test_a_failed_save_frees_its_memory(runs: Path, saving: Any, gated: Any) -> None:
    """It is in no copy and never loaded; memory takes the next one."""
    with saving(Memory("1MiB")) as ckpt:
        gated.error = OSError(28, "no space")
        save = ckpt.save_async(_state(1), 1)
        gated.let()
        with pytest.raises(OSError, match="no space"):
            ckpt.wait()
        assert (save.status, save.copies) == ("failed", [])
        ckpt.save_async(_state(1), 1)
        gated.let()
        ckpt.wait()
        assert ckpt.load()["step"] == 1


def test_lazy_and_prepared(runs: Path, saving: Any, gated: Any) -> None:
    """`prepare` takes all memory; a lazy save copies into it later."""
    with saving(*_two(), lazy=True) as ckpt:
        ckpt.prepare(_state(0), wait=True)
        assert _mapped_bytes() == 3 * MIB
        assert sum(one.used_bytes for one in ckpt.memory) == 0
        saves = []
        for step in range(3):
            saves.append(ckpt.save_async(_state(step), step))
            ckpt.before_optimizer_step()
        assert saves[2].copies[0].tier == _SLOW
        gated.let(3)
    with Checkpointer(runs / "a") as ckpt:
        assert torch.equal(ckpt.load(2)["w"], _state(2)["w"])


def test_a_larger_state(runs: Path) -> None:
    """The memory is divided anew; one that does not fit at all is refused, with the sizes."""
    with Checkpointer(runs / "a", tiers=_two("1MiB", "3MiB")) as ckpt:
        ckpt.save_async(_state(1), 1)
        ckpt.wait()
        larger = {"w": torch.arange(600_000, dtype=torch.float32)}
        save = ckpt.save_async(larger, 2)
        assert save.copies[0].tier == _SLOW
        ckpt.wait()
        assert torch.equal(ckpt.load()["w"], larger["w"])
        with pytest.raises(StateError, match=r"of 3\.82 MiB does not fit .*1\.00 MiB of memory \("):
            ckpt.save_async({"w": torch.zeros(1_000_000)}, 3)
        ckpt.save({"w": torch.zeros(1_000_000)}, 4)
        assert ckpt.latest() == 4


def test_a_larger_state_while_smaller_ones_wait(runs: Path, saving: Any, gated: Any) -> None:
    """It waits until their memory is enough, and no snapshot is lost."""
    with saving(Memory("3MiB")) as ckpt:
        for step in (1, 2):
            ckpt.save_async(_state(step), step)
        larger = {"w": torch.arange(600_000, dtype=torch.float32)}
        threading.Timer(0.1, gated.let, [3]).start()
        ckpt.save_async(larger, 3)
        ckpt.wait()
        assert ckpt.steps() == [1, 2, 3]
    with Checkpointer(runs / "a") as ckpt:
        assert torch.equal(ckpt.load(2)["w"], _state(2)["w"])
        assert torch.equal(ckpt.load(3)["w"], larger["w"])


def test_memory_is_freed(runs: Path) -> None:
    """With the Checkpointer, and with one that nobody closed."""
    with Checkpointer(runs / "a", tiers=[Memory("64MiB", path=_SHARED)]) as ckpt:
        ckpt.prepare(_state(1), wait=True)
        assert _mapped_bytes() == 64 * MIB
    assert _mapped_bytes() == 0
    ckpt = Checkpointer(runs / "b", tiers=[Memory("64MiB", path=_SHARED)])
    ckpt.prepare(_state(1), wait=True)
    with pytest.warns(ResourceWarning, match="was never closed"):  # noqa: PT031 -- two statements
        del ckpt
        gc.collect()
    assert _mapped_bytes() == 0


@pytest.mark.parametrize(
    ("tiers", "problem"),
    [
        (lambda _: [Memory("1MiB", node=99)], r"node=99: this machine has no such memory node: 0"),
        (lambda _: [Memory("1MiB", path="/nowhere")], "No such file"),
        (lambda _: [Memory("1MiB", path="/dev/null")], "must be a directory"),
        (lambda _: [Memory("1MiB", path=Path(__file__).parent)], "is storage, not memory"),
        (lambda _: [Memory("1kB")], "at least 4096 bytes"),
        (lambda _: [Memory("1MiB"), Memory("2MiB")], "the same memory twice: memory, memory"),
        (lambda runs: [Remote(runs / "r"), Memory("1MiB")], "the order is Memory, Remote"),
        (lambda runs: [Remote(runs / "r")] * 2, "one remote tier at most"),
        (lambda _: ["8GiB"], r"takes a list such as \[Memory"),
        (lambda _: [Memory(0)], "at least 1 byte"),
        (lambda _: [Memory("1MiB", node=-1)], "0 or more"),
        (lambda _: [Memory("1MiB", node=0, path="/dev/shm")], "not both"),
    ],
)
def test_tiers_that_cannot_be_had(
    runs: Path, tiers: Callable[[Path], list[Any]], problem: str
) -> None:
    """One clear error, and the directory is free."""
    with pytest.raises(OptionError, match=problem):
        Checkpointer(runs / "a", tiers=tiers(runs))
    Checkpointer(runs / "a").close()


def test_memory_of_a_node(runs: Path) -> None:
    """Its pages are bound to the node: the kernel says so."""
    if not Path("/sys/devices/system/node/node0/meminfo").exists():
        pytest.skip("this kernel has no NUMA nodes")
    with Checkpointer(runs / "a", tiers=[Memory("2MiB", node=0)]) as ckpt:
        save = ckpt.save_async(_state(1), 1)
        assert save.copies[0].tier == "memory of node 0"
        assert ckpt._memory is not None
        (slot,) = ckpt._memory.pool.slots()
        begin = f"{slot.memory.ctypes.data:x} "
        policies = Path("/proc/self/numa_maps").read_text().splitlines()
        (policy,) = [line for line in policies if line.startswith(begin)]
        assert re.search(r"^\w+ bind:0 .*N0=\d+", policy)


def test_a_directory_with_dax(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are mapped like those of tmpfs. That this one has DAX is pretended."""
    if linux.file_system_type(tmp_path) == linux.TMPFS:
        pytest.skip("the directory of the tests is on tmpfs")
    with pytest.raises(OptionError, match="is storage, not memory"):
        MemoryTier(Memory("16MiB", path=tmp_path))
    monkeypatch.setattr(linux, "is_dax", lambda _: True)
    with Checkpointer(runs / "a", tiers=[Memory("16MiB", path=tmp_path)]) as ckpt:
        save = ckpt.save_async(_state(1), 1)
        ckpt.wait()
        assert save.copies[0].tier == f"memory of {tmp_path}"
        assert torch.equal(ckpt.load()["w"], _state(1)["w"])
        assert list(tmp_path.iterdir()) == []


def test_a_limit_that_is_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What exists stays in use. New slots are in the next tier, or there are none."""
    left = [16 * MIB]  # an eighth, 2 MiB, is left to others
    monkeypatch.setattr("iobench.remote.memory.available_bytes", lambda: left[0])
    pool = MemoryPool([MemoryTier(Memory("4MiB")), MemoryTier(Memory("3MiB", path=_SHARED))])
    pool.grow(MIB)
    assert pool.count == 7
    first = pool.take(pinned=False)
    left[0] = 4 * MIB  # and the first slot has no pages yet
    pool.grow(MIB)
    assert pool.count == 2
    first.memory[:] = 1
    left[0] = 0
    pool.grow(MIB)
    assert pool.count == 1
    with pytest.raises(StateError, match=r"does not fit the memory tiers: .*\(0 B available\)"):
        pool.take(pinned=False)
    pool.give(first)
    assert pool.take(pinned=False) is first
    first.free()
    with pytest.raises(StateError, match="does not fit"):
        pool.grow(MIB)
    pool.free()


def test_a_slot_that_is_given_back_while_the_size_grows() -> None:
    """It is freed, whenever the persister returns it."""
    pool = MemoryPool([MemoryTier(Memory("4MiB"))])
    pool.grow(MIB)
    small = pool.take(pinned=False)
    pool.give(small)
    pool._size = 2 * MIB  # as if `give` had compared the sizes just before
    slot = pool.take(pinned=False)
    assert slot is not small
    assert (len(small.memory), len(slot.memory), pool.size_bytes) == (0, 2 * MIB, 2 * MIB)


def test_memory_that_the_system_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """tmpfs is full in spite of the count: the next tier is used."""
    pool = MemoryPool([MemoryTier(Memory("4MiB", path=_SHARED)), MemoryTier(Memory("3MiB"))])
    pool.grow(MIB)

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("iobench.linux.fallocate", full)
    slots = [pool.take(pinned=False) for _ in range(3)]
    assert {slot.tier for slot in slots if isinstance(slot, MemorySlot)} == {"memory"}
    with pytest.raises(StateError, match="does not fit"):
        pool.take(pinned=False)
