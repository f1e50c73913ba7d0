"""Saves that ranks of a RankPool make: in the background, with failures, and while others wait."""

import contextlib
import ctypes
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import iobench
from iobench.checkpoint import piece_reader as reader
from iobench.checkpoint.content import Streamed
from iobench.checkpoint.ranked.dcp_files import DcpFormat
from iobench.checkpoint.slots import SlotPool
from iobench.errors import StateError
from iobench.ranks.control import Control, shared_control
from tests.support.fake_device import states_on_a_gpu
from tests.support.rank_pool import in_world, leave_world
from tests.support.rank_states import state_of
from tests.support.tiers import until

_SECONDS = 60.0
_FS, _NEWNS = 0x200, 0x20000  # CLONE_FS, CLONE_NEWNS
_REC, _PRIVATE = 0x4000, 0x40000  # MS_REC, MS_PRIVATE


def _checkpointer(size: int, directory: str, **options: Any) -> iobench.Checkpointer:
    return iobench.Checkpointer(directory, world=in_world(size), deadline_s=_SECONDS, **options)


def _raised(call: Callable[[], Any]) -> str:
    """Return the error of `call` as text, "" without one."""
    try:
        call()
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 -- the test looks at it
        return f"{type(error).__name__}: {error}"
    return ""


@contextlib.contextmanager
def _gate(directory: str) -> Iterator[Path]:
    """Let writes of parts wait until a file exists."""
    gate, write = Path(f"{directory}.gate"), DcpFormat.write

    def waiting(self: DcpFormat, *args: Any) -> Any:
        until(gate.exists)
        return write(self, *args)

    with mock.patch.object(DcpFormat, "write", waiting):
        yield gate


def gated(size: int, directory: str, slots: int, on_full: str, steps: list[int]) -> list[str]:
    """Save `steps` in the background while the first is being written; return each status."""
    world = in_world(size)
    with _gate(directory) as gate:
        ckpt = _checkpointer(size, directory, slots=slots, on_full=on_full)
        made = []
        for step in steps:
            made.append(ckpt.save_async(state_of(world.rank, size, "rows", seed=step), step))
            if step == steps[0]:  # rank 0 has begun it, and the others wait for its word
                until(lambda: made[0].status == "writing")
        gate.touch()
        ckpt.close()
    return [save.status for save in made]


def leftovers(directory: str) -> list[str]:
    """Return what a test must not find in a directory of checkpoints."""
    return [name for name in os.listdir(directory) if name.startswith(".step-")]


def _fault(what: str, size: int) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which one rank fails: `write:1` when rank 1 writes."""
    where, _, rank = what.partition(":")
    if in_world(size).rank != int(rank):
        return contextlib.nullcontext()
    full = OSError(errno.ENOSPC, "No space left on device")
    match where:
        case "write":
            return mock.patch.object(DcpFormat, "write", side_effect=full)
        case "publish":
            return mock.patch.object(DcpFormat, "publish", side_effect=full)
        case "slot" | "ahead":
            return mock.patch.object(SlotPool, "take", side_effect=StateError("no memory left"))
        case "middle":
            return mock.patch.object(Streamed, "head", side_effect=full)
    raise ValueError(what)


def failing(size: int, directory: str, what: str, how: str) -> list[Any]:
    """Save with a fault; return the errors of the save and of the next call, and what is left."""
    world = in_world(size)
    ckpt = _checkpointer(size, directory, budget="100KiB" if how == "streamed" else None)
    state = state_of(world.rank, size, "rows")
    if what.startswith("ahead"):  # with a plan, the copy begins before the ranks have agreed
        ckpt.prepare(state, wait=True)
    with _fault(what, size):
        if how == "save":
            first = _raised(lambda: ckpt.save(state, 1))
        else:
            first = _raised(lambda: ckpt.save_async(state, 1))
            # The other rank comes to its next call at once: it may not know of the failure yet.
            if what.endswith(str(world.rank)):
                until(lambda: bool(ckpt._persister.failed))
    second = _raised(lambda: ckpt.save_async(state, 2))
    steps = ckpt.steps()
    third = _raised(lambda: ckpt.save(state, 3))
    ckpt.close()
    status = [save.status for save in ckpt.saves]
    return [first, second, third, steps, status]


def streamed(
    size: int, directory: str, layout: str, share: float, lazy: bool, gpu: bool
) -> list[Any]:
    """Save two states without a budget, and with one of `share` of what this rank writes.

    The tensors change as soon as they may. With `gpu` those of the second save count as CUDA
    tensors.
    """
    rank, found = in_world(size).rank, []
    states = {step: state_of(rank, size, layout, seed=step) for step in (1, 2)}
    with _checkpointer(size, f"{directory}/want") as want:
        sizes = [want.save(state, step).size_bytes for step, state in states.items()]
    budget = int(share * max(sizes))
    with contextlib.ExitStack() as stack:
        if gpu:
            states_on_a_gpu(stack.enter_context(pytest.MonkeyPatch.context()))
        ckpt = _checkpointer(size, f"{directory}/have", budget=budget, lazy=lazy)
        stack.enter_context(ckpt)
        for step, state in states.items():
            save = ckpt.save_async(state, step)
            state["array"].fill(-1)
            if lazy:
                ckpt.before_optimizer_step()
            for tensor in state["model"].values():
                getattr(tensor, "_local_tensor", tensor).fill_(-1)
            held = ckpt._persister.pool.size_bytes
            ckpt.wait()
            found.append([save.status, save.streamed, held <= budget + 4096])
    return found


def replicated_budget(size: int, directory: str) -> list[Any]:
    """Save with replicas through a budget of one slot and a half; return slots and outcomes.

    Then through one below the size of the state; return the error too.
    """
    state = state_of(in_world(size).rank, size, "rows")
    with _checkpointer(size, f"{directory}/size") as alone:
        budget = alone.save(state, 0).size_bytes * 3 // 2
    found: list[Any] = []
    with _checkpointer(size, f"{directory}/a", budget=budget, replicate=iobench.Partner()) as ckpt:
        for step in (1, 2):
            save = ckpt.save_async(state, step)
            ckpt.wait()
            found.append([save.status, save.streamed, ckpt._persister.pool.count])
        while not ckpt.replicas:
            time.sleep(0.01)
        found.append([one.outcome for one in ckpt.replicas][:1])
    options = {"budget": "100KiB", "replicate": iobench.Partner()}
    ckpt = _checkpointer(size, f"{directory}/b", **options)
    found.append(_raised(lambda: ckpt.save_async(state, 1)))
    _raised(ckpt.close)
    return found


def prepared(size: int, directory: str) -> list[Any]:
    """Prepare a state that rank 1 cannot save, then after a save that failed in the background."""
    world = in_world(size)
    state = state_of(world.rank, size, "rows")
    ckpt = _checkpointer(size, directory)
    bad = {**state, "own": iobench.PerRank(object() if world.rank else 1)}
    first = _raised(lambda: ckpt.prepare(bad))
    ckpt.save(state, 1)
    with _fault("write:1", size):
        failed = ckpt.save_async(state, 2)
        # Rank 0 comes to its next call at once: it may not know of the failure yet.
        until(lambda: not world.rank or failed.status == "failed")
    second = _raised(lambda: ckpt.prepare(state))
    ckpt.prepare(state)
    ckpt.save(state, 3)
    ckpt.close()
    return [first, second, ckpt.steps()]


def without_memory(size: int, directory: str, what: str) -> list[Any]:
    """Load together while rank 1 gets no memory for the file, or no thread; then load."""
    world = in_world(size)
    state = state_of(world.rank, size, "mixed")
    with _checkpointer(size, directory) as ckpt:
        ckpt.save(state, 1)
        one, name = (reader._Run, "of") if what == "pages" else (reader._Check, "__enter__")
        full = mock.patch.object(one, name, side_effect=MemoryError(f"no {what}"))
        with full if world.rank == 1 else contextlib.nullcontext():
            error = _raised(lambda: ckpt.load(restore_mode="broadcast", on_corrupt="previous"))
        threads = [one.name for one in threading.enumerate() if one.name == "iobench-check"]
        return [error, threads, ckpt.load(restore_mode="broadcast")["epoch"]]


def refused(size: int, directory: str, what: str) -> list[str]:
    """Save states that do not fit together; return the errors of a save and of a later one."""
    world = in_world(size)
    with _checkpointer(size, directory) as ckpt:
        state: dict[str, Any] = {"w": torch.ones(3), "epoch": 1}
        later = dict(state)
        match what:
            case "shape":
                state["w"] = torch.ones(3 + world.rank)
            case "value":
                state["epoch"] = 1 + world.rank
            case "object" if world.rank == 1:
                state["epoch"] = object()
            case "step":
                ckpt.save(state, 1)
        return [_raised(lambda: ckpt.save(state, 1)), _raised(lambda: ckpt.save(later, 2))]


def changing(size: int, directory: str) -> list[Any]:
    """Background saves whose structure changes in rank 1 alone, or which rank 1 cannot save."""
    world = in_world(size)
    found: list[Any] = []
    with _checkpointer(size, directory, slots=1) as ckpt:
        state: dict[str, Any] = {"w": torch.arange(300_000.0), "epoch": 1}
        ckpt.save_async(state, 1)
        ckpt.wait()
        if world.rank == 1:
            del state["w"]  # rank 0 has copied a half of it, and must copy all
        found.append(ckpt.save_async(state, 2).size_bytes)
        ckpt.wait()
        found.append(bool(torch.equal(ckpt.load(2)["w"], torch.arange(300_000.0))))
        state["bad"] = object() if world.rank == 1 else 1
        found.append(_raised(lambda: ckpt.save_async(state, 3)))
        del state["bad"]
        # The only slot is free again; a step that is saved already is refused in all ranks.
        found.append(_raised(lambda: ckpt.save_async(state, 2)))
        ckpt.save_async(state, 4)
        ckpt.wait()
        return [*found, [save.status for save in ckpt.saves], ckpt.steps()]


def saves(size: int, directory: str, steps: list[int]) -> None:
    """Save different states in these steps."""
    world = in_world(size)
    with _checkpointer(size, directory) as ckpt:
        for step in steps:
            ckpt.save_async(state_of(world.rank, size, "mixed", seed=step), step)
            ckpt.wait()


def loads(size: int, directory: str, on_corrupt: str, restore_mode: str) -> list[Any]:
    """Load the newest checkpoint; return the error, the epoch and the step."""
    import warnings

    with _checkpointer(size, directory) as ckpt, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        found: list[Any] = []
        how = {"on_corrupt": on_corrupt, "restore_mode": restore_mode}
        error = _raised(lambda: found.append(ckpt.load(**how)))
        epoch = found[0]["epoch"] if found else None
        return [error, epoch, ckpt.loaded.step if ckpt.loaded else None]


def full_disk(size: int, directory: str, filler: str) -> list[int]:
    """Save, fill the disk, and load twice; return the epochs."""
    world = in_world(size)
    control = shared_control(world).sub("full disk")
    with _checkpointer(size, directory) as ckpt:
        ckpt.save(state_of(world.rank, size, "mixed", seed=1), 1)
        if world.rank == 0:
            with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(bytes(4096)):
                    pass
            assert not os.statvfs(directory).f_bavail
        control.barrier("full", deadline_s=_SECONDS)
        return [ckpt.load()["epoch"] for _ in range(2)]


def kept(size: int, directory: str) -> list[Any]:
    """Retention, removal, and what each rank sees; saves of a structure that changes."""
    world = in_world(size)
    with _checkpointer(size, directory, keep=iobench.KeepLast(2)) as ckpt:
        state = state_of(world.rank, size, "rows")
        for step in (1, 2, 3):
            ckpt.save(state, step)
        state["more"] = torch.ones(2)
        ckpt.save(state, 4)
        found = [ckpt.steps(), ckpt.latest()]
        ckpt.prepare(state)  # all ranks have looked
        ckpt.remove(4)
        found += [ckpt.steps(), ckpt.latest(), _raised(lambda: ckpt.remove(4))]
        ckpt.load(3)
        ckpt.save(state, 4)
        # A rank that sees another directory listing gets the answer of rank 0.
        blind = {"return_value": []} if world.rank == 1 else {"side_effect": ckpt._store.steps}
        with mock.patch.object(ckpt._store, "steps", **blind):
            found.append(ckpt.latest())
        return [*found, ckpt.steps(), sorted(ckpt.load()["model"])[:2]]


def lazy(size: int, directory: str) -> list[Any]:
    """A lazy save, and one whose tensors change too early in rank 1."""
    world = in_world(size)
    ckpt = _checkpointer(size, directory, lazy=True)
    tensors = {"w": torch.ones(1000, 1000)}
    ckpt.save_async(tensors, 1)
    ckpt.before_optimizer_step()
    tensors["w"].add_(1)
    ckpt.wait()
    with mock.patch("iobench.checkpoint.snapshot._versions", _Versions(world.rank == 1)):
        ckpt.save_async(tensors, 2)
        first = _raised(ckpt.wait)
    again = _raised(lambda: ckpt.save(tensors, 3))
    found = [float(ckpt.load(1)["w"][0, 0]), first, again, ckpt.steps()]
    ckpt.close()
    return found


class _Versions:
    """Counters that differ between the calls, as if a tensor had changed."""

    def __init__(self, changes: bool) -> None:
        self._changes, self._calls = changes, 0

    def __call__(self, _: object) -> dict[str, int]:
        self._calls += 1
        return {"w": self._calls if self._changes else 0}


def auto_schedule(size: int, directory: str) -> list[bool]:
    """Ask a schedule that measures: the ranks must agree."""
    world = in_world(size)
    answers = []
    with _checkpointer(size, directory, schedule=iobench.Auto(warmup_steps=2)) as ckpt:
        for step in range(6):
            time.sleep(0.002 * (1 + world.rank))
            answers.append(ckpt.due(step))
            if answers[-1]:
                ckpt.save_async({"w": torch.ones(3)}, step)
    return answers


def opens(size: int, directory: str) -> str:
    """Return the error of opening a directory."""
    return _raised(lambda: _checkpointer(size, directory).close())


_open: list[iobench.Checkpointer] = []


def held_lock(size: int, directory: str) -> str:
    """Open a directory at the first call; save and close it at the second."""
    if not _open:
        _open.append(_checkpointer(size, directory))
        return ""
    ckpt = _open.pop()
    error = _raised(lambda: ckpt.save({"w": torch.ones(3)}, 1))
    ckpt.close()
    return error


@contextlib.contextmanager
def _other_node(directory: str) -> Iterator[None]:
    """Have another, empty file system at the path of the directory, like on another node."""
    libc = ctypes.CDLL(None, use_errno=True)

    def done(code: int) -> None:
        assert not code, os.strerror(ctypes.get_errno())

    cwd, before = os.getcwd(), os.open("/proc/thread-self/ns/mnt", os.O_RDONLY)
    try:
        done(libc.unshare(_NEWNS))
        done(libc.mount(None, b"/", None, _REC | _PRIVATE, None))
        done(libc.mount(b"none", directory.encode(), b"tmpfs", 0, None))
        yield
    finally:
        # Threads that were made meanwhile share the root directory, which setns changes.
        done(libc.unshare(_FS))
        done(libc.setns(before, _NEWNS))
        os.close(before)
        os.chdir(cwd)


def node_local(size: int, directory: str) -> list[Any]:
    """Rank 1 has another file system at the path of the directory."""
    other = in_world(size).rank == 1
    with _other_node(directory) if other else contextlib.nullcontext():
        ckpt = _checkpointer(size, directory)
        error = _raised(lambda: ckpt.save({"w": torch.ones(3)}, 1))
        ckpt.close()
        return [error, [name for name in os.listdir(directory) if "step" in name]]


def interrupted(size: int, directory: str, told: bool) -> list[Any]:
    """Ctrl-C in rank 1 while it waits for rank 0 in a save; then both save the next step.

    Return the errors of both saves. Unless `told`, rank 1 does not tell the others, as if it could
    not: one of them then waits for it until its deadline.
    """
    world, gate = in_world(size), Path(f"{directory}.gate")
    state = [{"own": iobench.PerRank(torch.full((9,), step))} for step in range(3)]
    try:
        ckpt = iobench.Checkpointer(directory, world=world, deadline_s=10)
        ckpt.save(state[0], 0)
        with contextlib.ExitStack() as stack:
            if world.rank == 1:
                member = ckpt._ranks._member
                assert member is not None
                waiting, interrupts = member._changed.wait, iter([KeyboardInterrupt])

                def wait(*given: Any) -> Any:
                    if threading.current_thread() is threading.main_thread():
                        raise next(interrupts)
                    return waiting(*given)

                stack.enter_context(mock.patch.object(member._changed, "wait", wait))
                if not told:
                    stack.enter_context(mock.patch.object(Control, "fail"))
            while world.rank == 0 and not gate.exists():
                time.sleep(0.01)
            first = _raised(lambda: ckpt.save_async(state[1], 1))
        gate.touch()

        def again() -> None:
            ckpt.save_async(state[2], 2)
            ckpt.wait()

        second = _raised(again)
        _raised(ckpt.close)
        return [first, second]
    finally:
        leave_world(size)


def broken_job(size: int, directory: str) -> list[str]:
    """An exception inside of `with` in rank 1 ends the waits of the others."""
    world = in_world(size)

    def use() -> None:
        with _checkpointer(size, directory) as ckpt:
            ckpt.save({"w": torch.ones(3)}, 1)
            if world.rank == 1:
                raise ValueError("the trainer failed")
            ckpt.save({"w": torch.ones(3)}, 2)

    try:
        return [_raised(use)]
    finally:
        leave_world(size)
