"""SavedRun: a job that tests start again and again on one directory, and make fail."""

import itertools
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

from support.nodes import Nodes, Process
from support.train_scripts import newest_checked

_LOST = 3  # exit code of a rank that got a RankError
_LIMIT_S = 60


def expect_lost(nodes: Nodes, survivors: Sequence[Process], lost: Process) -> None:
    """The survivors end with the name of the lost rank and its host."""
    nodes.wait(survivors, _LIMIT_S)
    for rank in survivors:
        last = rank.stdout().splitlines()[-1]
        shown = f"{rank}:\n{rank.stdout()}{rank.stderr()}"
        assert rank.code == _LOST, shown
        assert re.match(rf"lost \[{lost.rank}\] ", last), shown
        assert f"host {lost.node.host}" in last, shown


class SavedRun:
    """Starts of support.train_scripts.trains, one rank per node, with other numbers each time.

    Every start loads the newest step, checks all values, and saves more: so it finds out what the
    test before has left. That costs half of a start that only looks at it.
    """

    def __init__(self, nodes: Nodes, directory: Path) -> None:
        self.nodes, self.directory = nodes, directory
        self.newest = -1
        self._orders = itertools.cycle([(0, 1, 2), (2, 0, 1), (1, 2, 0)])
        self._before = self._test = "nothing"

    def start(
        self,
        test: str,
        saves: int = 3,
        *,
        how: str = "wait",
        restore_mode: str = "auto",
        points: dict[int, list[str]] | None = None,
    ) -> list[Process]:
        """Start the ranks, for `test`."""
        self._before, self._test = self._test, test
        self._expected = self.newest
        arguments = (str(self.directory), saves, 0.0, how, restore_mode)
        return self.nodes.ranks(
            "support.train_scripts:trains", *arguments, order=next(self._orders), points=points
        )

    def expect_done(self, ranks: Sequence[Process]) -> None:
        """All ranks have ended well, and every rank has loaded what was the newest step."""
        codes = self.nodes.wait(ranks, _LIMIT_S)
        assert codes == [0] * len(ranks), [rank.stdout() + rank.stderr() for rank in ranks]
        self.expect(ranks, self._expected)

    def expect(self, ranks: Sequence[Process], at_least: int) -> None:
        """The newest checkpoint is complete and at least this step. No rank has loaded another step
        than the one that was the newest; one may have been lost before."""
        for rank in ranks:
            for step in re.findall(r"^loaded (-?\d+)$", rank.stdout(), re.M):
                said = f"loaded {step}, {self._before} left {self._expected}"
                assert int(step) == self._expected, said
        self.newest = newest_checked(self.directory)
        assert self.newest >= at_least, (self.newest, at_least)

    def lose(self, ranks: Sequence[Process], victim: int, how: str) -> None:
        """Wait until a rank is killed, or stopped, at its point; the others end and name it."""
        lost = ranks[victim]
        if how == "stop":
            lost.wait_stopped(_LIMIT_S)
        else:
            code = lost.wait(_LIMIT_S)
            assert code == -signal.SIGKILL, f"it did not come to its point: {lost.stdout()}"
        expect_lost(self.nodes, [rank for rank in ranks if rank is not lost], lost)
        lost.kill()
        assert lost.wait(_LIMIT_S) == -signal.SIGKILL

    def finish(self) -> None:
        """Start once more, and end well: nothing but checkpoints is left."""
        ranks = self.start("the end", 2)
        self.expect_done(ranks)
        self.expect_names(self.newest - 1, self.newest)

    def expect_names(self, *steps: int) -> None:
        """The directory has these checkpoints and the lock, and nothing else."""
        names = {".iobench-lock", *(f"step-{step}" for step in steps)}
        assert set(os.listdir(self.directory)) == names
