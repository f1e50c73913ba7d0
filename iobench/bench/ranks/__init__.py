"""A run over the ranks of a launcher: rank 0 drives it, the others serve its commands."""
