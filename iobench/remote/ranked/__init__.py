"""The drain of several ranks: each rank copies a share of every checkpoint to the remote tier."""
