"""`python -m iobench` is `iobench`; it starts the command line."""

import gc
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
    finally:
        # The interpreter's end would search torch's 180,000 objects for cycles: 0.3 s.
        gc.freeze()


if __name__ == "__main__":
    run()
