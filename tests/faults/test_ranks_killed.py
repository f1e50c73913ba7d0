"""Random kills of a job with three ranks. benchmarks/rank_kills.py makes more of them."""

import pytest
from support.nodes import open_nodes
from support.rank_kills import RankKills
from support.train_scripts import newest_checked

pytestmark = pytest.mark.usefixtures("importing")
_KILLS = 8  # of each seed; these seeds have every fault, at every moment


@pytest.mark.parametrize("seed", [179, pytest.param(184, marks=pytest.mark.exhaustive)])
def test_random_kills(tmp_path, seed: int) -> None:
    """Ranks and nodes are killed, stopped and cut off at random moments. Each time the survivors
    end with the name of the lost rank, and no checkpoint that was reported is lost."""
    run = tmp_path / "run"
    run.mkdir()
    with open_nodes(3, directory=tmp_path) as nodes:
        kills = RankKills(
            nodes=nodes,
            directory=run,
            newest=newest_checked,
            seed=seed,
            target="support.train_scripts:trains",
        )
        for _ in range(_KILLS):
            kills.attempt()
    assert kills.held >= _KILLS // 4
