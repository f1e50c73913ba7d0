"""Random kills of a job with several ranks: the same for a quick test and for a long benchmark.

Each attempt starts the job on the directory of the attempts before, waits for a random moment,
and makes one rank or node fail. Then it expects that the survivors ended soon with the name of the
lost rank, that no process is left, and that the newest checkpoint is complete and at least as new
as every one that a rank has reported.
"""

import random
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from support.nodes import Nodes, Process

_FAULTS = {"kill": 70, "stop": 15, "power": 10, "partition": 5}
"""How often each happens, of 100."""

_MOMENTS = {"begin": 15, "open": 15, "loaded": 20, "saved": 50}
"""What the observed rank has printed last, of 100."""

_LOST = 3  # exit code of a rank that got a RankError
_LIMIT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of the job and its end. `ended_s`: from the fault to the end of all survivors."""

    number: int
    fault: str
    moment: str
    delay_s: float
    victim: int
    codes: tuple[int, ...]
    ended_s: float
    newest: int


@dataclass(kw_only=True)
class RankKills:
    """`newest` returns the newest step in `directory` after it has checked the whole checkpoint.

    `target` is support.train_scripts.trains. All random choices come from `seed`.
    """

    nodes: Nodes
    directory: Path
    newest: Callable[[Path], int]
    seed: int
    target: str = "support.train_scripts:trains"
    per_node: int = 1
    attempts: list[Attempt] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self.held = -1

    @property
    def outcomes(self) -> Counter[str]:
        """The number of attempts of each fault."""
        return Counter(attempt.fault for attempt in self.attempts)

    def attempt(self) -> Attempt:
        """Start the job and make it fail once. Raises AssertionError with what is wrong."""
        choose = self._random
        number = len(self.attempts)
        fault = choose.choices(list(_FAULTS), list(_FAULTS.values()))[0]
        moment = choose.choices(list(_MOMENTS), list(_MOMENTS.values()))[0]
        delay_s = choose.uniform(0, 0.06)
        order = choose.sample(range(len(self.nodes)), len(self.nodes))
        ranks = self.nodes.ranks(
            self.target, str(self.directory), 10_000, order=order, per_node=self.per_node
        )
        victim, observed = choose.choice(ranks), choose.choice(ranks)
        observed.wait_for(moment, _LIMIT_S)
        time.sleep(delay_s)
        began_s = time.monotonic()
        lost = self._fail(fault, victim, ranks)
        survivors = [rank for rank in ranks if rank.rank not in lost]
        self.nodes.wait(survivors, _LIMIT_S)
        ended_s = time.monotonic() - began_s
        for rank in survivors:
            self._expect_named(rank, lost, fault)
        self._mend(fault, victim, ranks)
        reported = max((_reported(rank) for rank in ranks), default=-1)
        newest = self.newest(self.directory)
        assert newest >= max(reported, self.held), (newest, reported, self.held)
        self.held = newest
        made = Attempt(
            number=number,
            fault=fault,
            moment=moment,
            delay_s=delay_s,
            victim=victim.rank,
            codes=tuple(rank.code or 0 for rank in ranks),
            ended_s=ended_s,
            newest=newest,
        )
        self.attempts.append(made)
        return made

    def _fail(self, fault: str, victim: Process, ranks: list[Process]) -> set[int]:
        """Make the victim, or its node, fail; return the ranks that are lost by it."""
        if fault == "kill":
            victim.kill()
        elif fault == "stop":
            victim.stop()
        elif fault == "power":
            victim.node.lose_power()
        else:
            victim.node.link("down")
        if fault in ("kill", "stop"):
            return {victim.rank}
        return {rank.rank for rank in ranks if rank.node is victim.node}

    def _mend(self, fault: str, victim: Process, ranks: list[Process]) -> None:
        """Undo the fault, and expect that no process of the job is left."""
        if fault == "stop":
            victim.kill()
        elif fault == "power":
            victim.node.boot()
        self.nodes.wait(ranks, _LIMIT_S)
        if fault == "partition":
            victim.node.link("up")
        left = [node.running() for node in self.nodes]
        assert not any(left), left

    def _expect_named(self, rank: Process, lost: set[int], fault: str) -> None:
        last = rank.stdout().splitlines()[-1]
        shown = f"{fault} of {lost}: {rank} printed {last!r}\n{rank.stderr()}"
        assert rank.code == _LOST, shown
        found = re.match(r"lost \[([0-9, ]*)\] ", last)
        assert found, shown
        named = {int(word) for word in found[1].split(",") if word.strip()}
        assert named, shown
        assert named <= lost, shown
        assert "(host node" in last or "never connected" in last or "cannot be reached" in last, (
            shown
        )


def _reported(rank: Process) -> int:
    """The newest step that the rank has reported as committed; -1 without any."""
    return max(
        (int(step) for step in re.findall(r"^saved (\d+)$", rank.stdout(), re.M)), default=-1
    )
