"""The command line with all verbs, for tests that call it or read its help."""

from iobench.cli.verbs import app_of

app = app_of()
