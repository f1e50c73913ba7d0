"""Limit of `--seed`, for the verbs that draw random numbers."""

from __future__ import annotations

__all__ = ["LARGEST_SEED"]

LARGEST_SEED = 2**32 - 1
"""Largest seed that all generators accept (optuna sets the limit), and all record readers."""
