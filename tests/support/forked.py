"""A forked child of this process: what it may use, and what it leaves alone."""

import os
import signal
import traceback
import warnings
from collections.abc import Callable

_LIMIT_S = 60


def in_child(call: Callable[[], object]) -> None:
    """Call a function in a forked child, which ends then. Its failure is that of the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork, from Python 3.12
        child = os.fork()
    if not child:
        code = 1
        try:
            signal.alarm(_LIMIT_S)  # it may wait for ever
            call()
            code = 0
        except BaseException:  # noqa: BLE001 -- a child never returns into pytest
            traceback.print_exc()
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    assert not status, "see the traceback of the child on stderr"
