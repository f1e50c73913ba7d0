"""Engines and streams of the writers that bypass the page cache."""
