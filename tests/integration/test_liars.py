"""Writers that lie are never VALID, honest ones always are: in a run and in a tuning."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from support.liars import LIARS, AdmitsIt, Liar, WritesBack, run, table, verdicts

from iobench import workloads
from iobench.bench.targets import directory
from iobench.bench.targets.choose import target_of
from iobench.tune.candidate import Candidate
from iobench.tune.measurement import Step
from iobench.tune.objective import Objective
from iobench.tune.trial_runner import TrialRunner
from iobench.units import MIB
from iobench.writers import registry
from iobench.writers.base import Writer
from iobench.writers.registry import make

_HONEST = ("buffered", "uncached", "odirect", "uring", "hybrid")
_DOC = Path(__file__).parents[2] / "docs" / "statistics.md"

Mount = Callable[[str, int], Path]


@pytest.fixture(autouse=True)
def _no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """No wait for a quiet device."""
    monkeypatch.setattr(directory, "settled", lambda *_: nullcontext())


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
def test_no_liar_is_valid(shared_filesystems: Mount, tmp_path: Path) -> None:
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
def test_honest_writers_are_believed_on(
    kind: str, shared_filesystems: Mount, tmp_path: Path
) -> None:
    """Their saves are VALID where pages are always dirty, or hidden; so are their cold restores."""
    root = shared_filesystems(kind, 1024 * MIB) / tmp_path.name
    root.mkdir()
    honest = able(root)
    found = verdicts(run(root, [*honest, AdmitsIt()]))
    assert found[AdmitsIt.name, "save"][0] == "INVALID"
    for writer in honest:
        for operation in ("save", "restore"):
            status, reasons = found[writer.name, operation]
            cold = [one.text for one in reasons if one.text.startswith("not cold")]
            expected = "INVALID" if kind == "tmpfs" and operation == "restore" else "VALID"
            assert status == expected, (writer.name, operation, reasons)
            assert bool(cold) is (expected == "INVALID")


@pytest.mark.root
@pytest.mark.filterwarnings("ignore:no longer needed:RuntimeWarning")  # retention under Mounts
@pytest.mark.parametrize("goal", ["save", "stall"])
def test_a_tuning_eliminates_liars(
    goal: str,
    shared_filesystems: Mount,
    tiny_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A trial of each ends in an error that names the lie; that of an honest writer does not."""
    root = quiet_ext4(shared_filesystems, tmp_path.name)
    kinds: dict[str, type[Liar]] = {liar.name: liar for liar in LIARS}
    known = registry.writer_class
    monkeypatch.setattr(registry, "writer_class", lambda name: kinds.get(name) or known(name))
    with TrialRunner.on(
        target_of(str(root), []),
        workload=workloads.load(str(tiny_path)),
        rank=0,
        objective=Objective(goal=goal),
        seed=1,
        pool_bytes=16 * MIB,
        began_s=0.0,
    ) as trial:
        options = make("buffered").options
        for number, name in enumerate(["buffered", *kinds]):
            one = Candidate(writer=name, options=options, origin="drawn")
            garbage = name != "buffered" and kinds[name].reason.startswith("wrong bytes")
            # The commits of a Checkpointer, which the stall is measured with, flush the device too.
            verify = garbage or name == WritesBack.name
            verify = verify or (name != "buffered" and kinds[name].lies_in == "restore")
            step = Step(phase="race", round=number, size_bytes=6 * MIB, verify=verify)
            error = trial(one, step).error
            if name == "buffered":
                assert error is None
            elif garbage:
                assert error is not None
                assert "tensors" in error
            else:
                assert error is not None, name
                # A Checkpointer, which the stall is measured with, commits no such save.
                refused = "did not make its files durable" in error
                assert kinds[name].reason in error or (name == AdmitsIt.name and refused)
