"""What the ranks of a RankPool do with memory tiers: functions that they call by name."""

import contextlib
import os
import random
import time
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

import iobench
from iobench.checkpoint.place import SaveJob
from iobench.checkpoint.ranked.dcp_files import DcpFormat
from iobench.remote import memory
from iobench.units import MIB
from tests.support.rank_pool import in_world
from tests.support.rank_saves import _SECONDS, _gate, _raised
from tests.support.rank_states import digest, full, state_of
from tests.support.tiers import until

_SHM = "/dev/shm"


def _opened(size: int, directory: str, tiers: list[Any], **options: Any) -> iobench.Checkpointer:
    return iobench.Checkpointer(
        directory, world=in_world(size), deadline_s=_SECONDS, tiers=tiers, **options
    )


def _state(rank: int, step: int, count: int = 1 << 18) -> dict[str, Any]:
    """Return replicated tensors, which are cut over the ranks, and a value of this rank."""
    return {"w": torch.full((2, count), float(step)), "own": iobench.PerRank(10 * step + rank)}


@contextlib.contextmanager
def _order() -> Iterator[list[int]]:
    """Record the order in which this rank writes its parts, by the first element of `w`."""
    steps: list[int] = []
    write = DcpFormat.write

    def noted(self: DcpFormat, job: SaveJob, offer: Any) -> Any:
        steps.append(job.content.number)
        return write(self, job, offer)

    with mock.patch.object(DcpFormat, "write", noted):
        yield steps


def _until(save: Any, status: str) -> None:
    until(lambda: save.status == status)


def spilled(size: int, directory: str, keep: int | None) -> dict[str, Any]:
    """Save six steps while nothing is written, then let them be written, and load."""
    world = in_world(size)
    # A snapshot of a rank has 1 MiB and some more: 2 fit the first tier, and 4 the second one.
    tiers = [iobench.Memory(size * (2 * MIB + MIB // 2)), iobench.Memory(size * 5 * MIB, path=_SHM)]
    kept = iobench.KeepLast(keep) if keep else None
    with _order() as order, _gate(directory) as gate:
        ckpt = _opened(size, directory, tiers, keep=kept)
        made = []
        for step in range(1, 7):
            made.append(ckpt.save_async(_state(world.rank, step, size << 17), step))
            if step == 1 and world.rank == 0:
                _until(made[0], "writing")
        volatile = [[(one.tier, one.state) for one in save.copies] for save in made]
        used = [(one.tier, one.size_bytes, one.used_bytes) for one in ckpt.memory]
        gate.touch()
        ckpt.wait()
        state = ckpt.load()
        found = {
            "volatile": volatile,
            "used": used,
            "order": list(order),
            "status": [save.status for save in made],
            "copies": [[one.state for one in save.copies] for save in made],
            "steps": ckpt.steps(),
            "loaded": [ckpt.loaded.step, state["w"].unique().tolist(), state["own"]],
            "sources": ckpt.loaded.sources,
        }
        first = ckpt.load(found["steps"][0])
        found["first"] = [first["w"].unique().tolist(), first["own"]]
        ckpt.remove(6)
        found["latest"] = ckpt.latest()
        ckpt.close()
    return found


def full_memory(
    size: int, directory: str, on_full: str, steps: list[int], options: dict[str, Any]
) -> list[str]:
    """Save `steps` while nothing is written; rank 1 has less memory than the others."""
    world = in_world(size)
    slots = 2 if world.rank == 1 else 5  # each has the bytes of 1 MiB and some more
    with _gate(directory) as gate:
        ckpt = _opened(
            size,
            directory,
            [iobench.Memory(size * (slots * MIB + MIB // 2))],
            on_full=on_full,
            **options,
        )
        made = []
        for step in steps:
            made.append(ckpt.save_async(_state(world.rank, step, size << 17), step))
            if step == steps[0]:
                if world.rank == 0:
                    _until(made[0], "writing")
                ckpt.latest()  # all ranks have come here
            if on_full == "wait" and step == steps[1]:
                gate.touch()
        gate.touch()
        ckpt.wait()
        ckpt.close()
    return [save.status for save in made]


def lowered(size: int, directory: str) -> list[Any]:
    """The memory that is available to rank 1 becomes less while training runs."""
    world = in_world(size)
    found: list[Any] = []
    with _gate(directory) as gate:
        ckpt = _opened(size, directory, [iobench.Memory(size * 8 * MIB)], on_full="skip")
        made = [ckpt.save_async(_state(world.rank, 1, size << 17), 1)]
        none = {"return_value": 0} if world.rank == 1 else {"wraps": memory.available_bytes}
        with mock.patch.object(memory, "available_bytes", **none):
            made += [ckpt.save_async(_state(world.rank, n, size << 17), n) for n in (2, 3)]
        made.append(ckpt.save_async(_state(world.rank, 4, size << 17), 4))
        gate.touch()
        ckpt.wait()
        found = [[save.status for save in made], ckpt.steps()]
        ckpt.close()
    return found


def nothing_fits(size: int, directory: str) -> list[Any]:
    """Rank 1 has no memory for a single snapshot; later saves are smaller."""
    world = in_world(size)
    own = MIB // 2 if world.rank == 1 else 8 * MIB
    with _opened(size, directory, [iobench.Memory(size * own)]) as ckpt:
        large = _state(world.rank, 1, size << 17)
        error = _raised(lambda: ckpt.save_async(large, 1))
        prepared = _raised(lambda: ckpt.prepare(large))
        saved = ckpt.save(large, 2).status  # needs no snapshot
        ckpt.wait()
        return [error, prepared, saved, ckpt.steps(), [save.status for save in ckpt.saves]]


def grown(size: int, directory: str) -> list[Any]:
    """The state grows while snapshots of the smaller one wait; rank 0 alone has more."""
    world = in_world(size)
    with _gate(directory) as gate:
        ckpt = _opened(size, directory, [iobench.Memory(size * 3 * MIB)])
        made = [ckpt.save_async(_state(world.rank, n, size << 17), n) for n in (1, 2)]
        gate.touch()
        for step in (3, 4):
            state = _state(world.rank, step, size << 17)
            made.append(ckpt.save_async({**state, "more": torch.ones(1 << 17)}, step))
        ckpt.wait()
        found = [[save.status for save in made], ckpt.steps(), float(ckpt.load()["w"][0, 0])]
        ckpt.close()
    return found


def damaged(size: int, directory: str) -> dict[str, Any]:
    """A bit of the snapshot of rank 1 flips after it was written."""
    world = in_world(size)
    with (
        _opened(size, directory, [iobench.Memory(size * 16 * MIB)]) as ckpt,
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        ckpt.save_async(state_of(world.rank, size, "rows"), 1)
        ckpt.wait()
        state = ckpt.load()
        whole = ckpt.loaded.sources
        state["model"].pop("tied")
        found: dict[str, Any] = {"whole": whole, "right": [digest(state["model"])]}
        tiers = ckpt._memory
        (slot,) = [one for one in tiers.pool.slots() if one.kept is not None]
        if world.rank == 1:
            slot.memory[len(slot.memory) // 8] ^= 1
        for _ in range(2):  # the second load finds no memory copy in rank 1
            state = ckpt.load()
            state["model"].pop("tied")
            found["right"].append(digest(state["model"]))
            found.setdefault("sources", []).append(ckpt.loaded.sources)
        found["expected"] = digest(full())
        found["said"] = [str(one.message) for one in said if one.category is RuntimeWarning]
        return found


def many(size: int, directory: str, seed: int, count: int, options: dict[str, Any]) -> Any:
    """Saves with random pauses in each rank; all ranks must decide alike. Return all statuses."""
    world = in_world(size)
    chance = random.Random(1000 * seed + world.rank)
    slots = random.Random(seed).choices(range(1, 5), k=size)[world.rank]
    keep = options.pop("keep", None)
    tiers: list[Any] = [iobench.Memory(size * (slots << 15))]
    remote = options.pop("remote", None)
    if remote is not None:
        tiers.append(iobench.Remote(f"{directory}.remote", **remote))
    write = DcpFormat.write

    def slow(self: DcpFormat, *args: Any) -> Any:
        time.sleep(chance.random() * 0.01)
        return write(self, *args)

    with mock.patch.object(DcpFormat, "write", slow):
        ckpt = _opened(
            size, directory, tiers, keep=iobench.KeepLast(keep) if keep else None, **options
        )
        made = []
        for step in range(count):
            time.sleep(chance.choice((0, 0, chance.random() * 0.01)))
            made.append(ckpt.save_async(_state(world.rank, step, size << 10), step))
            if chance.random() < 0.1:
                ckpt.before_optimizer_step()
        ckpt.wait()
        if remote is not None:
            ckpt.wait(until="remote")
        state = ckpt.load()
        found = [save.status for save in made], ckpt.steps(), float(state["w"][0, 0])
        ckpt.close()
    assert os.listdir(directory)
    return found
