"""Loads by all ranks of a job, from the nearest copies."""
