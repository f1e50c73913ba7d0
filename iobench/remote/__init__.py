"""Tiers: local storage and a remote store that hold the checkpoints of one run."""
