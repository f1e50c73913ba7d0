"""The possible sizes of checkpoints in a tuning."""

from __future__ import annotations

import pytest

from iobench.tune.budget import TuningSizes
from iobench.units import MIB


@pytest.mark.parametrize(
    ("confirm", "fixed", "least", "candidates"),
    [
        (64, False, 1, [64, 32, 16]),  # 16 MiB are the least that is halved to
        (65, False, 1, [65, 32.5, 16.25]),
        (63, False, 1, [63, 31.5]),
        (8, False, 1, [8]),  # what was asked for is tried all the same
        (64, True, 1, [64]),
        (64, False, 20, [64, 32]),
    ],
)
def test_ever_smaller_sizes(confirm: int, fixed: bool, least: int, candidates: list[float]) -> None:
    """Halves, as long as the workload fits and they are large enough; one size if it is fixed. In
    MiB."""
    sizes = TuningSizes(largest=confirm * MIB, fixed=fixed, fits=lambda size: size >= least * MIB)
    assert [size / MIB for size in sizes.candidates()] == candidates
