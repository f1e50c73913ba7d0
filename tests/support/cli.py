"""The command line with all verbs, for tests that call it or read its help."""

from __future__ import annotations

from iobench.cli.verbs import app_of

__all__ = ["app"]

app = app_of()
