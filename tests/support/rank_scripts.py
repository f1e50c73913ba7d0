"""What the ranks of a job do in the tests of faults."""

import json
import os
import threading
import time
from pathlib import Path

from iobench.errors import RankError, UsageError
from iobench.ranks.control import Control
from iobench.ranks.world import World


def joined() -> World:
    """Join the job. A rank that is lost is noticed after 2 s. Return the place of this rank."""
    impatient(30, 2)
    return World.detect()


def impatient(connect_s: float, lost_after_s: float) -> None:
    """Set how long this rank waits for others that start, and for a silent one."""
    os.environ.update(IOBENCH_CONNECT=f"{connect_s}s", IOBENCH_LOST_AFTER=f"{lost_after_s}s")


def meets(directory: str | None, deadline_s: float, *unset: str) -> None:
    """Connect without IOBENCH_TOKEN, an IOBENCH_STORE of that and the variables `unset`.

    Print the places of all ranks and interfaces.
    """
    if os.environ["IOBENCH_STORE"].startswith("tcp"):
        del os.environ["IOBENCH_STORE"]
    for name in ("IOBENCH_TOKEN", *unset):
        os.environ.pop(name, None)
    world = World.detect()
    where = None if directory is None else Path(directory)
    try:
        impatient(deadline_s, 300)
        with Control.connect(world, directory=where) as control:
            own = control.world
            place = [own.rank, own.local_rank, own.local_size, own.node, own.nodes, own.placed]
            address = control.interface.address
            print(json.dumps(control.all_gather("places", [place, address], deadline_s=30)))
    except (RankError, UsageError) as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        raise SystemExit(3) from None


def meets_by_groups() -> None:
    """Meet at the store of the trainer's process groups."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    meets(None, 30)
    dist.destroy_process_group()


def gathers(
    lost_after_s: float, deadline_s: float, rounds: int, pause_s: float, how: str = ""
) -> None:
    """Gather `rounds` times; print each result, and the RankError that ends it.

    `how`: "fork" leaves a forked child behind; "raise:R:N" raises in rank R before round N,
    "exit:R:N" ends it, "late:R:N" waits there, for longer than the deadline of this round.
    """
    world = World.detect()
    what, _, where = how.partition(":")
    if what == "fork" and not os.fork():
        threading.Event().wait(60)
    began_s = time.monotonic()
    try:
        impatient(deadline_s, lost_after_s)
        with Control.connect(world) as control:
            print("connected", flush=True)
            if what == "forked" and not os.fork():
                threading.Event().wait(60)
            for number in range(rounds):
                if where == f"{world.rank}:{number}":
                    _misbehave(what)
                began_s = time.monotonic()
                late = what == "late" and where.endswith(f":{number}")
                values = control.all_gather(
                    f"round {number}", world.rank, deadline_s=1 if late else deadline_s
                )
                assert values == list(range(world.size)), values
                print(f"round {number}", flush=True)
                threading.Event().wait(pause_s)
    except RankError as error:
        print(f"lost {list(error.ranks)} after {time.monotonic() - began_s:.1f} s: {error}")
        raise SystemExit(3) from None
    print("done", flush=True)


def _misbehave(what: str) -> None:
    if what == "raise":
        raise ValueError("wrong shape")
    if what == "exit":
        os._exit(0)
    if what == "late":
        threading.Event().wait(60)
