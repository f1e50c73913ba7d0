"""Parts that writers share: blocks and their workers, background work, waits for threads."""
