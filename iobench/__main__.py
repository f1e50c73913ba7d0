"""`python -m iobench` is `iobench`."""

from iobench.cli.main import run

run()
