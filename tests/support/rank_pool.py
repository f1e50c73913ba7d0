"""RankPool: ranks that stay alive over many tests, since the start of a job takes seconds.

A test sends the name of a function of a module under `tests`; every rank calls it, and the results
come back as JSON. The ranks are also jobs of fewer ranks: `in_world(2)` makes ranks 0 and 1 one.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from support.preloaded import Preloaded
from tests.support.ranks import PATH, free_port, torchrun_variables


class PoolError(Exception):
    """A function raised in some ranks; `traces` are by rank, "" where it returned."""

    def __init__(self, traces: Sequence[str]) -> None:
        super().__init__("\n".join(traces))
        self.traces = traces


class RankPool:
    """`size` processes with torchrun's variables and a gloo process group.

    `broken`: a rank has ended, and no call works any more.
    """

    def __init__(self, size: int) -> None:
        self.broken = False
        more = {"TORCHELASTIC_RUN_ID": f"pool-{os.getpid()}", "OMP_NUM_THREADS": 1}
        self.processes = [
            Preloaded(
                ["-m", "tests.support.rank_pool"],
                env={**os.environ, "PYTHONPATH": PATH, **own},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for own in torchrun_variables([0] * size, free_port(), **more)
        ]

    def call(self, function: Callable[..., Any], *args: Any, world: int | None = None) -> list[Any]:
        """Call `function(size, *args)` in all ranks, or in the first `world`; return the results.

        `size` is the number of these ranks. Raises PoolError.
        """
        ranks = self.processes[:world]
        command = json.dumps([function.__module__, function.__name__, [len(ranks), *args]])
        for rank in ranks:
            rank.stdin.write(command + "\n")
            rank.stdin.flush()
        answers = []
        for rank in ranks:
            line = rank.stdout.readline()
            answers.append(json.loads(line) if line else {"trace": "the rank ended"})
            self.broken |= not line
        if any("trace" in answer for answer in answers):
            raise PoolError([answer.get("trace", "") for answer in answers])
        return [answer["result"] for answer in answers]

    def first(self, size: int) -> FirstRanks:
        """Return the first ranks as a job of their own."""
        return FirstRanks(self, size)

    def close(self) -> None:
        """End the ranks. Raises AssertionError if one of them fails at its end."""
        for process in self.processes:
            process.stdin.close()
        try:
            codes = [process.wait(60) for process in self.processes]
        finally:
            self.kill()
        assert codes == [0] * len(codes), codes

    def kill(self) -> None:
        """Kill the ranks that are left."""
        for process in self.processes:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


class FirstRanks:
    """The first `size` ranks of a pool."""

    def __init__(self, pool: RankPool, size: int) -> None:
        self._pool, self._size = pool, size

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `function(size, *args)` in these ranks; return the results. Raises PoolError."""
        return self._pool.call(function, *args, world=self._size)


_meshes: dict[int, Any] = {}
_controls: dict[int, Any] = {}
_starts: Counter[int] = Counter()


def mesh_of(size: int) -> Any:
    """Return the mesh of the first `size` ranks, in a rank."""
    return _meshes[size]


def in_world(size: int) -> Any:
    """Return the World of the first `size` ranks, in one of them, and connect to the others."""
    from iobench.ranks import control
    from iobench.ranks.world import World

    found = World.detect()
    job = f"{found.job}-{size}-{_starts[size]}"
    world = replace(found, size=size, local_size=size, job=job)
    if size not in _controls:
        _controls[size] = control.Control.connect(world)
    control._shared = _controls[size]
    return world


def leave_world(size: int) -> None:
    """End the job of the first `size` ranks in one of them; the next `in_world` is another job."""
    _controls.pop(size).close()
    _starts[size] += 1


def _main() -> None:
    """Serve one rank: a line with a call on stdin gives a line with the result on stdout."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what tests and libraries print goes to stderr
    dist.init_process_group("gloo")
    for size in range(1, dist.get_world_size() + 1):
        _meshes[size] = DeviceMesh("cpu", torch.arange(size))
    for line in sys.stdin:
        module, name, args = json.loads(line)
        try:
            found = {"result": getattr(importlib.import_module(module), name)(*args)}
        except BaseException:  # noqa: BLE001 -- the test gets it
            found = {"trace": traceback.format_exc()}
        print(json.dumps(found), file=answers, flush=True)
    for connected in _controls.values():
        connected.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    # The functions of tests import this module by its name: one module, not two.
    importlib.import_module("tests.support.rank_pool")._main()
