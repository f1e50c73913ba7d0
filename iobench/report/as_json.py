"""The report as one JSON document, schema `iobench.report/1`."""

from __future__ import annotations

from typing import TextIO

from iobench.report.render import write_json
from iobench.report.summary import Report


def write(report: Report, stream: TextIO) -> None:
    """Write one document and a newline; numbers unrounded."""
    write_json(report.document(), stream)
