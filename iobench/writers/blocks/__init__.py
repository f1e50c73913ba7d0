"""Building blocks of the writers: background work."""
