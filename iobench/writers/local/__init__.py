"""I/O on local file systems: new files, their metadata, sync, and the calls that move bytes."""
