"""Memory tiers of a job of several ranks: each rank has the snapshots of its own file."""
