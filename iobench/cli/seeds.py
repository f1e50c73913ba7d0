"""`--seed` of the verbs that draw at random."""

from __future__ import annotations

__all__ = ["LARGEST_SEED"]

LARGEST_SEED = 2**32 - 1
"""What every generator in use takes (optuna's no more), and every reader of a record."""
