"""Names of stock functions are replaced while other threads import."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest
from support.reentry import at_every_collection

from iobench.integrations import replacing


def test_a_module_that_changes_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its names are looked through as they were."""

    def stock() -> None: ...
    def ours() -> None: ...

    monkeypatch.setattr(replacing, "sys", SimpleNamespace(modules={}))

    def check() -> tuple[Callable[[], object], Callable[[], object]]:
        module = ModuleType("module")
        for number in range(50):
            setattr(module, f"name_{number}", stock)

        def replaced() -> None:
            assert len(replacing.replace(stock, ours, module)) == 50

        return replaced, lambda: setattr(module, "new", 1)

    at_every_collection(check)
