"""Where a run stores its checkpoints: directories and buckets, scratch space, cold caches."""
