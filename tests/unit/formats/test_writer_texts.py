"""Formats take a writer as a Writer, as a text, or as the path of a writer.toml."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import iobench
from iobench.formats import raw, safetensors, torch_file

_TEXT = "buffered,block_size=64KiB"


@pytest.mark.parametrize("in_file", [False, True])
def test_every_format(in_file: bool, tmp_path: Path) -> None:
    """They save and load, and the Transfer names the writer."""
    writer: str | Path = _TEXT
    if in_file:
        writer = tmp_path / "writer.toml"
        writer.write_text(iobench.dump_writer(iobench.load_writer(_TEXT)))
    state, filled = {"weight": torch.arange(6)}, torch.zeros(6, dtype=torch.int64)
    saved = [
        safetensors.save(state, "a", tmp_path, writer),
        torch_file.save(state, "b", tmp_path, writer),
        raw.save(state.values(), "c", tmp_path, writer),
    ]
    first, *loaded = safetensors.load("a", tmp_path, writer)
    second, third = torch_file.load("b", tmp_path, writer)
    loaded += [third, raw.load([filled], "c", tmp_path, writer)]
    assert {one.writer for one in (*saved, *loaded)} == {"buffered"}
    for found in (first["weight"], second["weight"], filled):
        assert torch.equal(found, state["weight"])
