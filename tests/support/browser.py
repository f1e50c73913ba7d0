"""A page that a browser has opened."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

OpenPage = Callable[..., "Opened"]


@dataclass
class Opened:
    """A page in the browser, all its charts drawn. `problems` are what must not happen: messages
    on the console, errors, dialogs, requests for anything but the file."""

    page: Any
    problems: list[str] = field(default_factory=list)

    def count(self, selector: str) -> int:
        """Return the number of elements."""
        found: int = self.page.locator(selector).count()
        return found

    def marks(self, chart: str, kind: str) -> int:
        """Return how many marks of Vega's `kind`, such as `symbol`, a chart has."""
        return self.count(f'figure[data-chart="{chart}"] .mark-{kind}.role-mark > path')

    def tooltip(self, chart: str) -> list[str]:
        """Return the lines that appear with the pointer on the last sample, which is on top."""
        figure = self.page.locator(f'figure[data-chart="{chart}"]')
        figure.locator(".mark-symbol.role-mark > path").last.hover()
        shown = self.page.locator("#vg-tooltip-element.visible")
        shown.wait_for()
        lines: list[str] = shown.inner_text().splitlines()
        return lines

    def run(self, script: str) -> Any:
        """Return the value of an expression in JavaScript."""
        return self.page.evaluate(script)
