"""A whole checkpoint: commit protocol and manifest."""
