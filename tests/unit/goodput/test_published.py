"""The figures of docs/plan.md on Megatron's checkpoint, from the workload."""

from pathlib import Path

import pytest

from iobench import workloads

DOCS = Path(__file__).parents[3] / "docs" / "plan.md"


def test_the_checkpoint_of_ten_to_the_twelve_parameters() -> None:
    """14.11 TB take 51.7 s at 273 GB/s, and 14.1 s at 1 TB/s; 13.8 TB are published."""
    total = workloads.load("synthetic-1t-dist").total_size_bytes()
    assert total / 13.8e12 == pytest.approx(1.023, abs=0.001)
    for figure in (f"{total / 1e12:.2f} TB", f"{total / 273e9:.1f} s", f"{total / 1e12:.1f} s"):
        assert figure in DOCS.read_text()
