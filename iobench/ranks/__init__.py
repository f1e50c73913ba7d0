"""Ranks of one job: who they are, how they agree, and how bytes travel between them."""
