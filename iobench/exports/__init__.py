"""`iobench export`: stored checkpoints, in formats that other programs read."""
