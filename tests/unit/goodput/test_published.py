"""The figures of docs/plan.md: Megatron's from the workload, failure shapes' from the formulas."""

from pathlib import Path

import pytest

from iobench import workloads
from iobench.goodput import goodput
from iobench.goodput.costs import Costs
from iobench.goodput.job import TrainingJob
from iobench.units import format_seconds

DOCS = Path(__file__).parents[3] / "docs" / "plan.md"


def test_the_checkpoint_of_ten_to_the_twelve_parameters() -> None:
    """14.11 TB take 51.7 s at 273 GB/s, and 14.1 s at 1 TB/s; 13.8 TB are published."""
    total = workloads.load("synthetic-1t-dist").total_size_bytes()
    assert total / 13.8e12 == pytest.approx(1.023, abs=0.001)
    for figure in (f"{total / 1e12:.2f} TB", f"{total / 273e9:.1f} s", f"{total / 1e12:.1f} s"):
        assert figure in DOCS.read_text()


@pytest.mark.parametrize("shape", [1.0, 0.8, 0.7, 0.5])
def test_the_table_of_failure_shapes(shape: float) -> None:
    """Interval and loss at each shape, and at the interval of shape 1."""
    costs = Costs(blocking_s=30, restore_s=60)
    job = TrainingJob(nodes=2048, failure_shape=shape)
    best_s = goodput.best_interval_s(costs, job)
    constant_s = goodput.best_interval_s(costs, TrainingJob(nodes=2048))
    lost = [100 * (1 - goodput.ettr(one, costs, job)) for one in (best_s, constant_s)]
    row = f"| {shape:g} | {format_seconds(best_s)} | {lost[0]:.2f}% | {lost[1]:.2f}% |"
    assert row in DOCS.read_text()
