"""Checkpoints in the formats of other programs: `iobench export` and loads of model parts."""
