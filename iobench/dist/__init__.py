"""Ranks of one job: who they are, how they agree, and what they do together."""
