"""The real torchrun, with ranks that begin with torch and iobench imported.

Its agent, rendezvous, restarts and variables are torch's own. Where the agent would start a rank by
`exec`, it forks it by support.preloaded: the imports of each rank would take seconds.
"""

import os
import runpy
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support.preloaded import Preloaded, fork_server, run_preloaded

_REPOSITORY = str(Path(__file__).parents[2])


def torchrun(
    arguments: Sequence[object], *, timeout: float, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `torchrun ARGUMENTS` to its end, which must come in `timeout` seconds."""
    if "--standalone" in arguments:
        require_own_name()
    path = os.pathsep.join(filter(None, [_REPOSITORY, os.environ.get("PYTHONPATH", "")]))
    return run_preloaded(
        ["-c", "from support.torchrun import agent; agent()", *arguments],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
        timeout=timeout,
    )


def require_own_name() -> None:
    """Skip the test where `torchrun --standalone` would wait for the host's own name for minutes:
    a minimal root may have no line for it in /etc/hosts."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        pytest.skip(f"torchrun needs this host's own name, {name}: {error}")


class _Rank(Preloaded):
    """A rank, as the agent starts it: `python -u ...`."""

    def __init__(self, args: Sequence[str], **how: Any) -> None:
        _, *arguments = args
        super().__init__(arguments, **how)


def agent() -> None:
    """Be torchrun, in a preloaded process."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    fork_server()  # before torchrun has threads
    subprocess_handler.Popen = _Rank  # type: ignore[misc]  # in this process only
    runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)
