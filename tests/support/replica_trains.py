"""What the ranks of a trainer with replicas do in the tests of faults."""

import json
import threading
import warnings
from typing import Any

from iobench import Checkpointer, KeepLast, Partner
from iobench.errors import RankError
from iobench.ranks import control
from iobench.ranks.world import World
from support.rank_scripts import impatient
from support.train_scripts import check, made, say

_OWN = 300_000
"""Elements of the rank's own tensor, which is 1.2 MB."""


def replicates(directory: str, saves: int, asked: dict[str, Any]) -> None:
    """Load the newest step that all ranks can have, and save some more; exit with 3 if a rank is
    lost.

    `asked`: `options`, `options_of` (by rank), `first` (there is nothing to load), `stay`
    (wait for a signal at the end) and `silent_s`, after which a rank is lost.

    Prints "loaded N SOURCES", "told WARNING", "replica N OUTCOME", "saved N", "stays" and "done".
    """
    world = World.detect()
    warnings.simplefilter("always")
    warnings.simplefilter("ignore", ResourceWarning)  # a job that is broken closes nothing
    warnings.showwarning = lambda message, *_, **__: say(f"told {message}")
    options = asked["options"] | asked["options_of"].get(str(world.rank), {})
    try:
        impatient(20, asked["silent_s"])
        with Checkpointer(
            directory, keep=KeepLast(2), writer="odirect", replicate=Partner(**options)
        ) as ckpt:
            step = -1 if asked["first"] else _load(ckpt, world.rank)
            for now in range(step + 1, step + 1 + saves):
                _save(ckpt, now, world.rank)
            if asked["stay"]:
                say("stays")
                threading.Event().wait(60)
    except RankError as error:
        say(f"lost {list(error.ranks)} {error}")
        raise SystemExit(3) from None
    say("done")


def _load(ckpt: Checkpointer, rank: int) -> int:
    state = ckpt.load()
    step = ckpt.loaded.step
    check(state, step, rank)
    say(f"loaded {step} {json.dumps([ckpt.loaded.sources, sorted(ckpt.loaded.transfer.paths)])}")
    return step


def _save(ckpt: Checkpointer, step: int, rank: int) -> None:
    ckpt.save_async(made(step, rank, _OWN), step)
    while not any(one.step == step for one in ckpt.replicas):
        if control._shared is not None and control._shared.broken:
            break  # perhaps before the save was offered
        threading.Event().wait(0.005)
    for one in ckpt.replicas:
        if one.step == step:
            say(f"replica {step} {one.outcome} {one.reason}")
    ckpt.wait()
    say(f"saved {step}")
