"""System calls that move fewer bytes than requested."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def short_calls(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """`short_calls("pwritev", [3, 0, 7])`: the calls move at most that many bytes, then all.
    Returns the list of the remaining counts, so that a test can check that it was used up."""

    def limit(name: str, limits: list[int]) -> list[int]:
        real: Callable[..., int] = getattr(os, name)

        def limited(number: int, data: Any, *rest: int) -> int:
            if not limits:
                return real(number, data, *rest)
            room = limits.pop(0)
            if name == "pwrite":
                return real(number, bytes(data[:room]), *rest) if room else 0
            views = []
            for view in data:
                views.append(view[:room])
                room -= len(views[-1])
            return real(number, views, *rest)

        monkeypatch.setattr(os, name, limited)
        return limits

    return limit
