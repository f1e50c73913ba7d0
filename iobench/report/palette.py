"""Colours of the charts: one for each writer and peer, the same in every report.

Each has a contrast of at least 3 to white and to the dark background (WCAG 2.2, 1.4.11). Our
writers are grey, blue, green and violet, peers are orange, red and brown, and have another shape.
No chart needs the colour alone: rows and lines have labels.
"""

from __future__ import annotations

import zlib

from iobench.peers import PREFIX

CIRCLE, DIAMOND = "circle", "diamond"

_WRITERS = {
    "buffered": "#7d8794",
    "uncached": "#1096b0",
    "odirect": "#1f6dc0",
    "uring": "#b15ad6",
    "hybrid": "#2f9a4b",
    "aiofiles": "#14958a",
    "gds": "#6f9a1e",
    "s3": "#5a6fe0",
    "null": "#8b8b8b",
}
_PEERS = {
    "torch-save": "#d5622a",
    "torch-save-mmap": "#b9770f",
    "dcp": "#d04a5c",
    "safetensors": "#c4568f",
    "deepspeed-aio": "#a8703e",
    "fastsafetensors": "#a88a14",
    "runai-streamer": "#e0584b",
    "tensorstore": "#99704a",
    "torch-checkpointing": "#c9682f",
    "obstore": "#b0607a",
    "boto3-upload-file": "#c76f52",
    "s3torchconnector": "#b56aa8",
}


def colour_of(writer: str) -> str:
    """Return the colour of a writer or `peer:NAME`; of an unknown one by a hash of its name."""
    name = writer.removeprefix(PREFIX)
    known = _PEERS if name != writer else _WRITERS
    # Not hash(): that of a text differs from process to process.
    number = zlib.crc32(name.encode("utf-8", "surrogatepass")) % len(known)
    return known.get(name) or [*known.values()][number]


def shape_of(writer: str) -> str:
    """Return the shape of a sample: peers differ from our writers without colour too."""
    return DIAMOND if writer.startswith(PREFIX) else CIRCLE
