"""collector_paused and forks."""

from __future__ import annotations

import gc
import os

from iobench.formats.collector import collector_paused


def test_a_child_that_is_forked_in_a_pause() -> None:
    """It has the collector on: the thread that would resume it may be missing there."""
    with collector_paused():
        assert not gc.isenabled()
        if (child := os.fork()) == 0:
            os._exit(gc.isenabled())
        assert not gc.isenabled()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert gc.isenabled()
    with collector_paused(), collector_paused():
        pass
    gc.disable()
    try:
        if (child := os.fork()) == 0:
            os._exit(gc.isenabled())
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        gc.enable()
