"""The interval between checkpoints: as given, or computed from measured times."""

from __future__ import annotations

from pathlib import Path

import pytest

from iobench.errors import OptionError
from iobench.train import session
from iobench.train.arm import Arm, choose_arms
from iobench.train.pace import Pace, StepTimes, probe
from iobench.train.trainer import Trainer


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("20", 20),
        ("2xpersist", 5),  # 2 x 1.2 s of steps of 0.5 s
        ("2.5xpersist", 6),
        ("0.1xpersist", 1),
        ("3.5%", 6),  # 0.1 s of stall are 3.5% of 2.86 s
        ("50%", 3),  # no sooner than it is written
    ],
)
def test_steps(text: str, steps: int) -> None:
    pace = Pace.parse(text)
    assert pace.steps_for(StepTimes(step_s=0.5, stall_s=0.1, persist_s=1.2)) == steps
    assert str(pace) == text


@pytest.mark.parametrize("text", ["0", "-1", "often", "x persist", "0xpersist", "0%", "100%", ""])
def test_refused(text: str) -> None:
    with pytest.raises(OptionError, match=r"--every .*2xpersist"):
        Pace.parse(text)


@pytest.mark.slow
def test_probe(tmp_path: Path) -> None:
    """Times of real saves. The directory has the last one: the start, 3 steps, 3 saves."""
    trainer = Trainer(100_000, ballast_bytes=100)
    arm = choose_arms("buffered", "lazy=1")[0][1]
    found = probe(trainer, arm, tmp_path / "probe", 0.0)
    assert min(found.step_s, found.persist_s) > 0
    assert [path.name for path in (tmp_path / "probe").glob("step-*")] != ["step-0"]


@pytest.mark.parametrize("simulated", [True, False])
def test_a_step_is_measured_with_its_share_of_the_change(
    simulated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A simulated step changes one of as many parts as an interval has steps, also in the probe."""
    parts: list[int] = []

    def probed(trainer: Trainer, arm: Arm, directory: Path, simulated_s: float) -> StepTimes:
        assert (arm.label, simulated_s > 0) == ("buffered lazy=1", simulated)
        directory.mkdir()
        parts.append(len(trainer._parts))
        return StepTimes(step_s=1.0 if len(parts) == 1 else 0.5, stall_s=0.0, persist_s=2.0)

    monkeypatch.setattr(session, "probe", probed)
    asked = session.make_session(
        workload="gpt5b-nemo",
        arms=choose_arms("buffered", "lazy=1")[0],
        target=tmp_path,
        size="64MiB",
        steps=2,
        every="2xpersist",
        repeat=1,
        model_params=100_000,
        simulate_step=simulated,
    )
    _, every, _ = asked._rhythm(Trainer(100_000, ballast_bytes=1000))
    assert parts == ([1, 4] if simulated else [1])
    assert every == (8 if simulated else 4)
    assert list(tmp_path.iterdir()) == []
