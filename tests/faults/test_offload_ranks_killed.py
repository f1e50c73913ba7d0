"""kill -9 of one rank of an FSDP2 job with offloaded state, and then of the job: a restart takes
the newest step that all ranks have, and ends with the bits of a training that was not killed."""

import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.offload_ranks import STEPS, Job, run_job

_STORE = "iobench.offload.store.GenerationStore"
_FILE = "iobench.offload.files.StateFile"
_RANKS = "iobench.offload.parameters.ShardRanks"
_CALLS = {
    "iobench.writers.direct.engine.RingEngine._submit": 60,
    "iobench.offload.engine.Engine._write": 12,
    "iobench.offload.update.ChunkUpdate.__call__": 15,
    f"{_FILE}.sync": 16,
    f"{_FILE}.write": 7,
    f"{_STORE}.commit": 5,
    f"{_STORE}.pin": 2,
    f"{_STORE}.agree": 5,
    f"{_RANKS}.gather": 13,
}
"""Functions at the steps of a commit, and how often a rank calls them."""
_BEGINS = ("iobench.offload.files.make_files", "iobench.offload.files.write_text")
_RESUMES = (f"{_STORE}.rewind", f"{_RANKS}.common", "iobench.offload.chunks.ChunkReader.start")


class _Jobs:
    """Jobs of `size` ranks in one directory, and the digests of each step of a stock training."""

    def __init__(self, size: int, base: Path) -> None:
        self.size, self.base = size, base
        stock = run_job("stock", size, base)
        assert stock.codes == [0] * size, stock.errors
        self.expected = stock.digests()

    def run(
        self, point: str = "", victim: int = 0, kind: str = "offload", steps: int = STEPS
    ) -> Job:
        """Run the job; check what every rank has reported."""
        job = run_job(kind, self.size, self.base, steps=steps, point=point, victim=victim)
        if point:
            assert job.codes[victim] in (0, -signal.SIGKILL), job.errors[victim]
        for expected, found in zip(self.expected, job.digests(), strict=True):
            assert found.items() <= expected.items(), point
        return job

    def finish(self) -> int:
        """Go on to the end; return the step that the ranks went on from."""
        job = self.run()
        assert job.codes == [0] * self.size, job.errors
        assert all(lines[-1] == {"done": STEPS} for lines in job.lines)
        assert all(STEPS in found for found in job.digests())
        shutil.rmtree(self.base / "state")
        return job.resumed()


@pytest.fixture(scope="module")
def jobs(request, tmp_path_factory) -> Iterator[_Jobs]:
    base = tmp_path_factory.mktemp(f"ranks{request.param}")
    yield _Jobs(request.param, base)
    shutil.rmtree(base)


_QUICK = pytest.mark.parametrize(
    "jobs", [2, pytest.param(4, marks=pytest.mark.exhaustive)], indirect=True
)
"""Points are the same in 4 ranks, of which every test run kills some at random."""

# What is on storage differs from point to point: after one call it is that before the next.
_NAMED = [
    *((f"{name}:before:1", 0, 0) for name in _BEGINS),
    (f"{_BEGINS[-1]}:after:1", 0, 0),
    ("iobench.offload.engine.Engine._write:before:5", 0, 4),
    # The syncs of a commit are those of both data files and of its record; a pin has one.
    *((f"{_FILE}.sync:{when}:7", 1, 2) for when in ("before", "after")),  # the pin of step 2
    *((f"{_FILE}.sync:before:{call}", 2, 2) for call in (8, 9)),
    *((f"{_FILE}.write:{when}:3", 1, 2) for when in ("before", "after")),  # the pin, too
    (f"{_STORE}.pin:before:1", 1, 2),
    (f"{_STORE}.commit:before:3", 2, 2),
    (f"{_STORE}.commit:after:3", 2, 3),
    (f"{_RANKS}.gather:before:10", 2, 3),  # two of each step, after three
    *((f"{_STORE}.agree:{when}:4", 3, 3) for when in ("before", "after")),
]
"""Points, and between which steps the restart must go on."""


@_QUICK
@pytest.mark.parametrize(("point", "least", "most"), _NAMED)
def test_named_points(point: str, least: int, most: int, jobs) -> None:
    """Each phase of the construction, of a commit, a pin and the agreement on it."""
    job = jobs.run(point, jobs.size - 1)
    assert job.codes[-1] == -signal.SIGKILL
    assert least <= jobs.finish() <= most


@_QUICK
@pytest.mark.parametrize(
    "point", [*(f"{name}:before:1" for name in _RESUMES), f"{_RESUMES[-1]}:after:1"]
)
def test_killed_in_resume(point: str, jobs) -> None:
    """A rank that is killed while it resumes leaves the step that the others have chosen."""
    jobs.run(f"{_STORE}.commit:before:4", 1)
    before = jobs.run(point, 0)
    assert before.codes[0] == -signal.SIGKILL
    assert jobs.finish() == 3


@_QUICK
def test_ranks_wait_for_one_that_is_late(jobs) -> None:
    """A rank that waits before its commit, and is killed: the others have not gone so far that they
    overwrite what it has."""
    point = f"{_STORE}.commit:before:2"
    job = jobs.run(f"{point}:kill+{point}:slow", 0, "offload-quiet")
    assert job.codes[0] == -signal.SIGKILL
    assert jobs.finish() == 1


@_QUICK
def test_two_histories_are_not_mixed(jobs) -> None:
    """Rank 0 has step 3 of the first job only, and the others that of the second."""
    point = f"{_STORE}.commit:before:3"
    jobs.run(f"{point}:kill+{point}:slow", 1)
    point = f"{_STORE}.agree:before:2"  # the first one is of the resume
    job = jobs.run(f"{point}:slow+{point}:kill", 0)
    assert job.codes[0] == -signal.SIGKILL
    assert job.resumed() == 2
    assert jobs.finish() == 2


@_QUICK
def test_a_pin_that_one_rank_lacks(jobs) -> None:
    """The others have replaced the pin before, and its extra: all go on from that one."""
    point = f"{_STORE}.pin:before:2"
    job = jobs.run(f"{point}:kill+{point}:slow", 1)
    assert job.codes[1] == -signal.SIGKILL
    job = jobs.run(kind="offload-pinned")
    assert job.resumed() == 2
    for first, *_ in job.lines:
        assert (first["pinned"], first["extra"]) == ([2], {"step": 2})
    assert jobs.finish() == STEPS


@pytest.mark.parametrize("jobs", [4, pytest.param(2, marks=pytest.mark.exhaustive)], indirect=True)
def test_random_points(jobs) -> None:
    """Jobs with a rank that is killed at a random call, again and again until they end."""
    seed = random.randrange(2**32)
    choose = random.Random(seed)
    try:
        for _ in range(8):
            name = choose.choice(sorted(_CALLS))
            point = f"{name}:{choose.choice(['before', 'after'])}:{choose.randint(1, _CALLS[name])}"
            jobs.run(point, choose.randrange(jobs.size))
        jobs.finish()
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise


_SAVES = "iobench.offload.saves.ShardedSaves"
_PHASES = [
    f"{_SAVES}.added_to:before:2",
    f"{_STORE}.commit:before:2",
    "iobench.checkpoint.ranked.dcp_files.DcpFormat.write:before:2",
    *(
        f"iobench.checkpoint.ranked.dcp_files.DcpFormat.publish:{when}:2"
        for when in ("before", "after")
    ),
]
"""Phases of a save of the ranks; `publish` is that of rank 0."""


@_QUICK
@pytest.mark.parametrize("point", _PHASES)
def test_killed_in_a_save(point: str, jobs) -> None:
    """The next start goes on from the newest checkpoint."""
    job = jobs.run(point, 0, "offload-ckpt")
    assert job.codes[0] == -signal.SIGKILL
    again = jobs.run(kind="offload-ckpt")
    assert again.codes == [0] * jobs.size, again.errors
    found = {one["loaded"] for lines in again.lines for one in lines if "loaded" in one}
    assert found <= {1, 2, 3}
    assert all(STEPS in digests for digests in again.digests())
    for name in ("state", "checkpoints"):
        shutil.rmtree(jobs.base / name)


@_QUICK
@pytest.mark.parametrize("point", [f"{_SAVES}.take:before:1", f"{_STORE}.commit:before:1"])
def test_killed_in_a_load(point: str, jobs) -> None:
    """A rank that is killed while the ranks go on from a checkpoint leaves it whole."""
    first = jobs.run(kind="offload-ckpt", steps=3)
    assert first.codes == [0] * jobs.size, first.errors
    assert jobs.run(point, 0, "offload-ckpt").codes[0] == -signal.SIGKILL
    again = jobs.run(kind="offload-ckpt")
    assert again.codes == [0] * jobs.size, again.errors
    assert all(STEPS in digests for digests in again.digests())
    for name in ("state", "checkpoints"):
        shutil.rmtree(jobs.base / name)
