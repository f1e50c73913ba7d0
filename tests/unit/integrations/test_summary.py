"""The summary of `iobench exec`, as docs/exec.md shows it."""

from __future__ import annotations

import re
from pathlib import Path

from iobench.integrations.redirect.call_counts import Count, Function
from iobench.integrations.redirect.launch import ExecOutcome, summary
from iobench.writers.registry import make

_PAGE = Path(__file__).parents[3] / "docs" / "exec.md"


def test_the_page_shows_the_summary() -> None:
    """Line by line."""
    torch_save = Function(
        redirected=Count(calls=18, bytes=1_667_236, seconds=0.315),
        stock={"not a path but a file object": Count(calls=1, seconds=0.0)},
    )
    save_file = Function(redirected=Count(calls=4, bytes=404_132, seconds=0.147))
    outcome = ExecOutcome(
        returncode=0,
        elapsed_s=1.0,
        functions={"safetensors.torch.save_file": save_file, "torch.save": torch_save},
        problems=(),
        processes=1,
    )
    shown = re.findall(r"^    iobench exec: (.*)$", _PAGE.read_text(), re.MULTILINE)
    assert [*summary(outcome, make("hybrid"))] == shown
