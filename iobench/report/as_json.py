"""The report as one JSON document, schema `iobench.report/1`."""

from __future__ import annotations

import json
from typing import TextIO

from iobench.report.summary import Report


def write(report: Report, stream: TextIO) -> None:
    """Write one document and a newline; numbers unrounded."""
    json.dump(report.document(), stream, indent=2, allow_nan=False)
    stream.write("\n")
