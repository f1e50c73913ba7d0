"""Statistics, comparisons and verdicts."""
