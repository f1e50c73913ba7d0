"""Result files as a pandas table."""

from dataclasses import replace
from pathlib import Path

import pandas as pd

from iobench.results import ResultWriter, load, read
from iobench.results.records import BackgroundRestores


def test_one_row_per_sample_with_flat_columns(example_path: Path) -> None:
    frame = load(example_path)
    assert len(frame) == 12
    first = frame.iloc[0]
    assert first["writer"] == "odirect"
    assert first["bytes_per_s"] == 2**31
    assert first["option.block_size"] == 16 * 2**20
    assert first["phase.write_s"] == 0.25
    assert first["path.direct.operations"] == 64
    assert first["device.write_bytes"] == 2**30 + 65536
    assert first["workload"] == "llama7b"
    assert first["workload.scaled"]
    assert first["hostname"] == "node1"
    assert first["kernel"] == "6.1.0-18-amd64"
    assert first["machine.versions.torch"] == "2.13.0"
    assert first["storage.fs_type"] == "ext4"
    assert first["storage.mount_options"] == ["rw", "relatime"]
    assert first["run_status"] == "complete"
    assert first["started_at"] == pd.Timestamp("2026-01-31T12:01:00Z")
    restore = frame[frame["operation"] == "restore"].iloc[0]
    assert restore["cold.resident_fraction"] == 0
    assert restore["verified.mismatches"] == 0
    assert pd.isna(restore["phase.sync_s"])
    assert not {"cold", "device", "verified", "paths", "options", "phases_s"} & set(frame.columns)


def test_no_column_holds_objects(tmp_path: Path) -> None:
    """Each nested field has its own columns: docs/results.md."""
    for path in sorted((Path(__file__).parents[3] / "results").glob("reference-*.jsonl")):
        if "autotune" not in path.name:
            frame = load(path)
            held = [name for name in frame if frame[name].map(lambda x: isinstance(x, dict)).any()]
            assert held == [], path
    frame = load(Path(__file__).parents[3] / "results" / "reference-llama7b.jsonl")
    asked = BackgroundRestores(
        writer="odirect",
        restores=1,
        bytes=2,
        lead_s=0.1,
        lag_s=0.1,
        reading_s=1.0,
        resident_fraction=0.0,
        from_storage=None,
        mismatches=0,
    )
    result = read(Path(__file__).parents[3] / "results" / "reference-llama7b.jsonl")
    path = tmp_path / "run.jsonl"
    with ResultWriter(path) as results:
        results.write(result.run)
        results.write(replace(result.samples[0], background_restores=asked))
    assert load(path)["background_restores.bytes"].tolist() == [2]
    assert {"memory.process_bytes", "stored.unsynced_bytes"} <= set(frame.columns)


def test_each_decision_is_a_column(tmp_path: Path, example_path: Path) -> None:
    text = example_path.read_text()
    path = tmp_path / "run.jsonl"
    path.write_text(text.replace('"fallbacks": []', '"decisions": {"direct: large": 9}', 1))
    frame = load(path)
    assert frame["decision.direct: large"].sum() == 9
    assert "decisions" not in frame
    assert not [name for name in load(example_path) if name.startswith("decision")]


def test_several_files_stand_in_one_table(tmp_path: Path, example_path: Path) -> None:
    killed = tmp_path / "killed.jsonl"
    killed.write_bytes(b"".join(example_path.read_bytes().splitlines(keepends=True)[:4]))
    frame = load([example_path, str(killed)])
    assert len(frame) == 13
    assert frame["run_status"].tolist() == ["complete"] * 12 + ["killed"]
    assert frame["file"].nunique() == 2


def test_a_run_without_samples_gives_an_empty_table(tmp_path: Path, example_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(example_path.read_bytes().splitlines(keepends=True)[0])
    assert load(path).empty
