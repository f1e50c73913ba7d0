"""KilledSaves: saves that are killed (kill -9) at random moments, in every phase of a save."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from iobench.testing import expect
from support import save_server


@dataclass(frozen=True, kw_only=True)
class _Moment:
    """One entry of a phase in a measured save, and the seconds until the next phase begins."""

    phase: str
    entry: int
    lasts_s: float


class KilledSaves:
    """Saves of numbered checkpoints by one writer, each in its own process.

    The moments to kill at come from a complete save, which is measured first. The phases take
    turns, so that a short phase is killed as often as a long one. The entry of the phase is random.
    In every other round the save stands at this entry until it is killed, so that each phase is met
    however fast it is; in the rounds between, it goes on for a random part of the phase.
    """

    def __init__(self, server: subprocess.Popen[str], seed: int) -> None:
        self._server, self._random = server, random.Random(seed)
        self._moments: dict[str, list[_Moment]] = {}
        self._turn = 0

    def save(self, number: int) -> None:
        """Save checkpoint `number` completely, and take the moments to kill at from this save."""
        entered = self._ask({"number": number})
        expect(entered[-1][0] == save_server.DONE, f"save {number} ended in {entered[-1][0]}")
        times = [at for _, at in entered]
        self._moments = {}
        for (phase, at), until in zip(entered, [*times[1:], times[-1]], strict=True):
            found = self._moments.setdefault(phase, [])
            found.append(_Moment(phase=phase, entry=len(found), lasts_s=until - at))

    def kill(self, number: int, phase: str = "", entry: int | None = None) -> str:
        """Begin to save checkpoint `number` and kill the process.

        Returns the phase that was killed, or `done` after the last one. `phase` and `entry`, its
        number counted from 0, are chosen if they are not given. Requires a `save` before.
        """
        around, turn = divmod(self._turn, len(self._moments))
        self._turn += 1
        entries = self._moments[phase or sorted(self._moments)[turn]]
        moment = self._random.choice(entries) if entry is None else entries[entry]
        after_s = self._random.uniform(0, moment.lasts_s) if around % 2 else None
        entered = self._ask(
            {"number": number, "phase": moment.phase, "entry": moment.entry, "after_s": after_s}
        )
        return entered[-1][0]

    def _ask(self, request: Mapping[str, Any]) -> list[tuple[str, float]]:
        """Return the phases that the save entered, with the seconds since its start."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        expect(answer, "the process that saves has ended; its traceback is on stderr")
        outcome = json.loads(answer)
        status = outcome["status"]
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        expect(killed, f"save {request['number']} failed; its traceback is on stderr")
        return sorted(((phase, at) for phase, at in outcome["entered"]), key=lambda one: one[1])


@contextmanager
def killed_saves(
    writer: str,
    options: Mapping[str, object],
    target: str,
    *,
    how: str,
    size_bytes: int,
    seed: int = 7,
    factory: str = "",
) -> Iterator[KilledSaves]:
    """Yield saves by the registered `writer` to `target`; `how` is write, stream or checkpoint.

    `write` and `stream` replace the file `model` each time. `checkpoint` publishes the directory
    `step-NUMBER` as a whole: 3/4 of the bytes are streamed to `model`, the rest is in `shards/0`
    and `shards/1`. Every 8 bytes are the number; `size_bytes` is a multiple of 64. `factory`,
    written `module:function`, returns the writer's class if it is not the registered one.
    """
    order = {
        "writer": writer,
        "options": dict(options),
        "factory": factory,
        "path": sys.path,
        "target": target,
        "how": how,
        "size": size_bytes,
    }
    with subprocess.Popen(
        [sys.executable, save_server.__file__, json.dumps(order)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        yield KilledSaves(server, seed)
