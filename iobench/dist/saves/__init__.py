"""Saves and loads of one checkpoint by all ranks of a job."""
