"""collector_paused and forks."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable

from support.reentry import everywhere

from iobench.formats import collector
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


def test_a_pause_that_another_thread_begins_meanwhile() -> None:
    """Both are counted, and none is left at the end."""

    def pause() -> None:
        with collector_paused():
            pass

    def check(enter: Callable[..., bool]) -> bool:
        other = collector_paused()
        there = enter(pause, other.__enter__)
        if there:
            other.__exit__(None, None, None)
        assert not collector._pauses
        assert gc.isenabled()
        return there

    everywhere(collector, check)
