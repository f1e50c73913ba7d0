"""One headless Chromium for the tests of this directory; the network is cut."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from support.browser import Opened, OpenPage

from iobench.report.document import Document
from iobench.report.page.html import html

_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
_WAIT_MS = 20_000


# Of this package, not of the session: the event loop of playwright runs in this thread, and tests
# elsewhere run their own.
@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next((found for name in _PROGRAMS if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip(f"no browser is installed: {', '.join(_PROGRAMS)}")
    with playwright.sync_playwright() as running:
        sandbox = os.geteuid() != 0  # Chromium refuses to run as root with its sandbox
        one = running.chromium.launch(executable_path=program, chromium_sandbox=sandbox)
        yield one
        one.close()


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[OpenPage]:
    """Write a Document to a file and open it: `open_page(page, width=400, scheme="dark")`.

    All its charts are drawn, unless the browser is never `idle`: then the first one is.
    """
    contexts = []

    def opened(
        page: Document,
        width: int = 1280,
        scheme: Literal["light", "dark"] = "light",
        *,
        idle: bool = True,
    ) -> Opened:
        path = tmp_path / f"{len(contexts)}.html"
        path.write_text(html(page), encoding="utf-8")
        context = browser.new_context(
            viewport={"width": width, "height": 850}, color_scheme=scheme, offline=True
        )
        contexts.append(context)
        tab = context.new_page()
        if not idle:
            tab.add_init_script("window.requestIdleCallback = () => 0")
        tab.set_default_timeout(_WAIT_MS)
        one = Opened(tab)
        tab.on("console", lambda message: one.problems.append(f"console: {message.text}"))
        tab.on("pageerror", lambda error: one.problems.append(f"error: {error}"))
        tab.on("dialog", lambda dialog: one.problems.append(f"dialog: {dialog.message}"))
        tab.on("request", lambda request: _check(request.url, path, one.problems))
        tab.goto(path.as_uri())
        tab.wait_for_selector("html[data-drawn]" if idle else ".chart[data-drawn]")
        return one

    yield opened
    for context in contexts:
        context.close()


def _check(url: str, path: Path, problems: list[str]) -> None:
    if url != path.as_uri() and not url.startswith("blob:"):  # of the button that saves a file
        problems.append(f"request: {url[:200]}")
