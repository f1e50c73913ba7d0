"""Commands under a launcher of ranks: torchrun, srun, mpirun."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from iobench.cli.given import quiet_stdout
from iobench.errors import IobenchError, RankError, UsageError
from iobench.ranks.world import World
from iobench.writers.s3_store.target import is_s3

if TYPE_CHECKING:
    from iobench.bench.ranks.start import Launched

_INTERRUPTED = 130


@contextmanager
def launched(target: str | Path | None = None) -> Iterator[Launched | None]:
    """Yield the ranks of the launcher in rank 0, and None in a process without a launcher.

    The other ranks serve rank 0 here, print nothing but their own errors, and exit with rank 0's
    exit code. When the block raises, they end too. `target` is where the ranks save; rank 0 may
    publish its address there.
    """
    directory = Path(target) if target and not is_s3(target) and os.path.isdir(target) else None
    world = World.detect()
    if world.size == 1:
        yield None
        return
    from iobench.bench.ranks.members import introduce
    from iobench.bench.ranks.start import Launched
    from iobench.ranks.control import Control

    if world.rank:
        _serve(world, directory)
    with Control.connect(world, directory=directory) as control:
        members = introduce(control)
        assert members is not None
        ranks = Launched(control, members)
        try:
            yield ranks
        except RankError:
            raise
        except IobenchError as error:
            if ranks.waiting:  # its exit code is all that the others need
                ranks.end(error.exit_code)
            raise
        ranks.end(0)


def _serve(world: World, directory: Path | None) -> None:
    """Serve rank 0 and exit like it. An interrupt reaches all ranks, and rank 0 tells of it."""
    from iobench.bench.ranks.group import serve
    from iobench.ranks.control import Control

    try:
        with quiet_stdout(), Control.connect(world, directory=directory) as control:
            code = serve(control)
    except KeyboardInterrupt:
        raise SystemExit(_INTERRUPTED) from None
    except RankError as error:
        if error.exit_code == _INTERRUPTED:
            raise SystemExit(_INTERRUPTED) from None
        raise
    raise typer.Exit(code)


def is_other_rank() -> bool:
    """Return whether rank 0, another process, prints the same help or error of a command line."""
    try:
        return World.detect().rank != 0
    except UsageError:  # of the environment: a command that needs the ranks raises it
        return False


def one_process(verb: str) -> None:
    """Raise UsageError in a process that a launcher started with others: `verb` measures one.

    Only rank 0 says so; the other ranks exit with the same code.
    """
    world = World.detect()
    if world.size == 1:
        return
    error = UsageError(
        f"iobench {verb} runs in one process, and {world.launcher} started {world.size}; start it "
        "without a launcher (iobench run measures over ranks)"
    )
    if world.rank:
        raise SystemExit(error.exit_code)
    raise error
