"""The part of the ranks other than rank 0: they carry out its commands until it ends the run."""

from __future__ import annotations

from iobench.bench.ranks.members import SETUP_S, introduce
from iobench.bench.ranks.setup import Setup, make_job
from iobench.bench.ranks.steps import END, NEXT, OPERATION_S, Steps
from iobench.ranks.control import Control
from iobench.results.codec import from_plain

__all__ = ["serve"]


def serve(control: Control) -> int:
    """Serve the run of rank 0, and return its exit code.

    Raises RankError when another rank is lost or failed, and what the set-up of this rank raises.
    """
    introduce(control)
    if control.broadcast("plan", deadline_s=OPERATION_S) is not None:
        setup = from_plain(Setup, control.scatter("set-up", deadline_s=SETUP_S))
        job = make_job(setup)
        job.join(control)
        with Steps(control, job) as steps:
            control.barrier("start", deadline_s=SETUP_S)
            while (message := control.broadcast(NEXT, deadline_s=OPERATION_S)) is not None:
                if message["each"]:
                    message = control.scatter(f"own {NEXT}", deadline_s=OPERATION_S)
                steps.carry_out(message)
    return int(control.broadcast(END, deadline_s=OPERATION_S))
