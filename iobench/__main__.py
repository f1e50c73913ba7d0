"""`python -m iobench` is `iobench`; it starts the command line."""

import sys

__all__ = ["run"]


def run() -> None:
    """Run the command line. Ctrl-C while its modules are loaded gives no traceback either."""
    try:
        from iobench.cli.main import run as run_command

        run_command()
    except KeyboardInterrupt:
        sys.stderr.write("iobench: interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    run()
