"""ReplicaJob: a job on nodes whose memory keeps replicas from one start to the next."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support.nodes import Node, Nodes, Process
from support.train_scripts import newest_checked

_LIMIT_S = 60


class ReplicaJob:
    """Starts of one job with a rank per node, on one directory.

    Every start loads the newest step, checks each value, and saves more. So a start finds out
    whether what the one before has left is complete and loads.
    """

    def __init__(self, nodes: Nodes, directory: Path, size: int = 2, **options: Any) -> None:
        self.nodes, self.directory, self.size = nodes, directory, size
        self._options = {"rate": "1GiB", **options}
        self.newest = -1
        self._held = False

    def start(
        self,
        saves: int = 2,
        *,
        order: Sequence[int] | None = None,
        points: dict[int, list[str]] | None = None,
        options: Mapping[str, Any] | None = None,
        options_of: Mapping[int, Mapping[str, Any]] | None = None,
        stay: bool = True,
        silent_s: float = 10.0,
    ) -> list[Process]:
        """Start the ranks. `stay`: they wait for a signal when they have saved."""
        self._held = False
        asked = {
            "options": {**self._options, **(options or {})},
            "options_of": options_of or {},
            "first": self.newest < 0,
            "stay": stay,
            "silent_s": silent_s,
        }
        return self.nodes.ranks(
            "support.replica_trains:replicates",
            str(self.directory),
            saves,
            asked,
            order=order or range(self.size),
            points=points,
            job=f"job {self.directory.name}",
        )

    def leave(self, ranks: Sequence[Process]) -> None:
        """Wait until the ranks have saved; kill them. The last step stays in memory."""
        for rank in ranks:
            rank.wait_for("stays", _LIMIT_S)
        for rank in ranks:
            rank.kill()
        self.nodes.wait(ranks, _LIMIT_S)
        self._held = all(outcomes(rank)[-1] == "complete" for rank in ranks)
        self.expect_complete(ranks)

    def hold(self) -> int:
        """Return the newest step, which all nodes and the storage have."""
        if not self._held:
            self.leave(self.start(1))
            assert self._held
        return self.newest

    def finish(self) -> list[Process]:
        """Start once more, and end well: then nothing but checkpoints is left."""
        ranks = self.start(2, stay=False)
        codes = self.nodes.wait(ranks, _LIMIT_S)
        assert codes == [0] * self.size, [rank.stdout() + rank.stderr() for rank in ranks]
        self.expect_complete(ranks)
        names = {".iobench-lock", f"step-{self.newest - 1}", f"step-{self.newest}"}
        assert set(os.listdir(self.directory)) == names
        return ranks

    def expect_complete(self, ranks: Sequence[Process]) -> None:
        """Every visible checkpoint is complete, and none that was reported is lost. All ranks have
        loaded the same step, at least as new as the storage had then."""
        loaded = {loads(rank)[0] for rank in ranks if "\nloaded " in f"\n{rank.stdout()}"}
        assert len(loaded) <= 1, loaded
        assert min(loaded, default=self.newest) >= self.newest, (loaded, self.newest)
        found = re.findall(r"^saved (\d+)$", "".join(rank.stdout() for rank in ranks), re.M)
        newest = newest_checked(self.directory)
        assert newest >= max(map(int, found), default=self.newest), (newest, found)
        self.newest = newest

    @staticmethod
    def files(node: Node) -> list[Path]:
        """Return the files with the bytes of ranks in the memory of a node."""
        shm = Path(f"/proc/{node.pid}/root/dev/shm")
        return sorted(shm.glob("iobench-*/replicas/*/*/__*_0.distcp"))

    def flip(self, node: Node) -> int:
        """Flip a bit in the middle of every such file; return how many there are."""
        files = self.files(node)
        for file in files:
            with file.open("r+b") as opened:
                at = opened.seek(file.stat().st_size // 2)
                (byte,) = opened.read(1)
                opened.seek(at)
                opened.write(bytes([byte ^ 1]))
        return len(files)


def loads(rank: Process) -> tuple[int, dict[str, str], list[str]]:
    """Return the step that the rank has loaded, its sources, and the ways of its bytes."""
    found = re.search(r"^loaded (-?\d+) (.*)$", rank.stdout(), re.M)
    assert found, rank.stdout() + rank.stderr()
    sources, paths = json.loads(found[2])
    return int(found[1]), sources, paths


def outcomes(rank: Process) -> list[str]:
    """Return the outcomes of the replicas, in the order of the saves."""
    return re.findall(r"^replica \d+ (\w+)", rank.stdout(), re.M)


def told(rank: Process) -> str:
    """Return the warnings of a rank."""
    return "\n".join(re.findall(r"^told (.*)$", rank.stdout(), re.M))
