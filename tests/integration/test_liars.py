"""Writers that lie are never VALID, honest ones always are: in a run and in a tuning."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from support.captured import captured
from support.liars import LIARS, AdmitsIt, Liar, SaysDirect, WritesBack, run, table, verdicts

from iobench import workloads
from iobench.bench.choose import target_of
from iobench.bench.judging.verdict import Context, judge
from iobench.bench.targets import base
from iobench.results import read
from iobench.tune.objective import Objective, Step
from iobench.tune.space import Candidate
from iobench.tune.trial_runner import TrialRunner
from iobench.units import MIB
from iobench.writers import registry
from iobench.writers.base import Writer
from iobench.writers.registry import make

_HONEST = ("buffered", "uncached", "odirect", "uring", "hybrid")
_EXPECTED = {
    ("tmpfs", "restore"): "INVALID",
    ("fuse", "save"): "NOT PROVED",
    ("overlay", "save"): "NOT PROVED",
}
_DOC = Path(__file__).parents[2] / "docs" / "statistics.md"

Mount = Callable[[str, int], Path]


@pytest.fixture(autouse=True)
def _no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """No wait for a quiet device."""
    monkeypatch.setattr(base, "settled", lambda *_: nullcontext())


def able(where: Path, names: tuple[str, ...] = _HONEST) -> list[Writer]:
    """The honest writers that work there."""
    return [one for one in map(make, names) if one.available(where).ok]


def quiet_ext4(filesystems: Mount, name: str) -> Path:
    """A directory of an ext4 that flushes its device only when a program syncs."""
    mounted = filesystems("ext4", 1024 * MIB)
    subprocess.run(["mount", "-o", "remount,commit=300", str(mounted)], check=True)
    (mounted / name).mkdir()
    return mounted / name


@pytest.mark.root
def test_no_liar_is_valid(shared_filesystems, tmp_path) -> None:
    """Each is INVALID for the reason that names its lie; the documented table is what comes out."""
    root = quiet_ext4(shared_filesystems, tmp_path.name)
    honest = able(root)
    result = run(root, [*(liar() for liar in LIARS), *honest])
    found = verdicts(result)
    for liar in LIARS:
        status, reasons = found[liar.name, liar.lies_in]
        assert status == "INVALID", liar.name
        assert any(one.text.startswith(liar.reason) for one in reasons), (liar.name, reasons)
        assert found[liar.name, "save"][0] == "INVALID", liar.name
    for writer in honest:
        for operation in ("save", "restore"):
            assert found[writer.name, operation] == ("VALID", []), writer.name
    if [one.name for one in honest] == list(_HONEST):
        assert "\n".join(table(result, honest)) in _DOC.read_text()
    assert os.listdir(root / "target") == []


@pytest.mark.root
@pytest.mark.parametrize("kind", ["tmpfs", "xfs", "btrfs", "overlay", "fuse"])
def test_honest_writers_are_believed_on(kind, shared_filesystems, tmp_path) -> None:
    """Their saves are VALID where pages are always dirty, or hidden and a device counts; so are
    their cold restores. Where nothing counts (FUSE, overlayfs), saves are NOT PROVED."""
    root = shared_filesystems(kind, 1024 * MIB) / tmp_path.name
    root.mkdir()
    honest = able(root)
    found = verdicts(run(root, [*honest, AdmitsIt()]))
    assert found[AdmitsIt.name, "save"][0] == "INVALID"
    for writer in honest:
        for operation in ("save", "restore"):
            status, reasons = found[writer.name, operation]
            cold = [one.text for one in reasons if one.text.startswith("not cold")]
            expected = _EXPECTED.get((kind, operation), "VALID")
            assert status == expected, (writer.name, operation, reasons)
            assert bool(cold) is (expected == "INVALID")


@pytest.mark.root
@pytest.mark.filterwarnings("ignore:no longer needed:RuntimeWarning")  # retention under Mounts
@pytest.mark.parametrize("goal", ["save", "stall"])
def test_a_tuning_eliminates_liars(
    goal, shared_filesystems, tiny_path, tmp_path, monkeypatch
) -> None:
    """A trial of each ends in an error that names the lie; that of an honest writer does not."""
    root = quiet_ext4(shared_filesystems, tmp_path.name)
    kinds: dict[str, type[Liar]] = {liar.name: liar for liar in LIARS}
    known = registry._WRITERS.find
    monkeypatch.setattr(registry._WRITERS, "find", lambda name: kinds.get(name) or known(name))
    with TrialRunner(
        target=target_of(str(root), []),
        workload=workloads.load(str(tiny_path)),
        rank=0,
        objective=Objective(goal=goal),
        seed=1,
        pool_bytes=16 * MIB,
    ).running(0.0) as trial:
        options = make("buffered").options
        for number, name in enumerate(["buffered", *kinds]):
            one = Candidate(writer=name, options=options, origin="drawn")
            garbage = name != "buffered" and kinds[name].reason.startswith("wrong bytes")
            # The commits of a Checkpointer, which the stall is measured with, flush the device too.
            verify = garbage or name == WritesBack.name
            verify = verify or (name != "buffered" and kinds[name].lies_in == "restore")
            step = Step(phase="race", round=number, size_bytes=6 * MIB, verify=verify)
            error = trial(one, step).error
            if name == "buffered" or (name == SaysDirect.name and goal == "stall"):
                assert error is None  # the memory of a stall is not measured
            elif garbage:
                assert error is not None
                assert "tensors" in error
            else:
                assert error is not None, name
                # A Checkpointer, which the stall is measured with, commits no such save.
                refused = "did not make its files durable" in error
                assert kinds[name].reason in error or (name == AdmitsIt.name and refused)


_NO_SYNCS = """
int fsync(int fd) { return 0; }
int fdatasync(int fd) { return 0; }
int syncfs(int fd) { return 0; }
int sync_file_range(int fd, long offset, long length, unsigned flags) { return 0; }
void sync(void) {}
"""


@pytest.fixture
def without_syncs(tmp_path: Path) -> Iterator[None]:
    """Children load a library that makes every sync do nothing, as libeatmydata does."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler here, for a library that replaces fsync")
    source, library = tmp_path / "no_syncs.c", tmp_path / "no_syncs.so"
    source.write_text(_NO_SYNCS)
    subprocess.run([compiler, "-w", "-shared", "-fPIC", "-o", library, source], check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_PRELOAD", str(library))
        yield


@pytest.mark.usefixtures("without_syncs")
def test_nothing_is_valid_where_a_library_ignores_syncs(tiny_path, tmp_path) -> None:
    """Not a save nor a restore of a run; a tuning writes no file; doctor reports a failure."""
    (tmp_path / "target").mkdir()
    record, config = tmp_path / "run.jsonl", tmp_path / "writer.toml"
    names = ",".join(one.name for one in able(tmp_path, ("buffered", "odirect")))

    def iobench(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "iobench", *words, "--target", str(tmp_path / "target")]
        return captured(command, cwd=tmp_path)

    asked = ("--writer", names, "--repeat", "1", "--no-fio", "-o", str(record))
    run = iobench("run", str(tiny_path), *asked)
    assert run.returncode == 0, run.stderr
    result = read(record)
    context = Context.of(result.run)
    found = {str(judge(one, context).status) for one in result.samples}
    assert found == {"INVALID"}
    assert "syncs are ignored here" in run.stdout

    asked = ("--writer", "buffered", "--max-time", "10s", "-o", str(config))
    tuned = iobench("autotune", str(tiny_path), *asked)
    assert tuned.returncode != 0
    assert "syncs are ignored here" in tuned.stdout + tuned.stderr
    assert not config.exists()

    doctor = iobench("doctor")
    assert "nothing is synced here" in doctor.stdout
