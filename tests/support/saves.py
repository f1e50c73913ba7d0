"""Saves: one file, by both ways of a writer."""

from pathlib import Path

from iobench.writers.base import Writer
from iobench.writers.image import Bytes, FileImage


def save(writer: Writer, how: str, directory: Path, data: Bytes) -> None:
    """Save `data` as the file `model`, by `write` or by a stream."""
    if how == "write":
        writer.write(FileImage.of("model", [data]), directory)
        return
    with writer.open(directory / "model") as stream:
        stream.write(data)
