"""benchmarks/gpu.py runs to its end; a device of host memory stands for the GPU."""

import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch

_SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


def test_without_a_gpu_nothing_is_measured(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--target", str(tmp_path)])
    monkeypatch.syspath_prepend(_SCRIPT.parent)
    assert runpy.run_path(str(_SCRIPT))["main"]() == 3
    assert "Nothing was measured" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not shutil.which("fio"), reason="fio is not installed")
def test_every_arm_and_fio(tmp_path, monkeypatch, capsys) -> None:
    """Each is in the table, and nothing is left."""
    for name, answer in (("is_available", True), ("get_device_name", "host"), ("synchronize", 0)):
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    words = ["--target", str(tmp_path), "--size", "16MiB", "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", ["gpu.py", *words])
    monkeypatch.syspath_prepend(_SCRIPT.parent)
    main = runpy.run_path(str(_SCRIPT))["main"]
    monkeypatch.setitem(main.__globals__, "DEVICE", "cpu")
    assert main() == 0
    out = capsys.readouterr().out
    for arm in ("save odirect", "restore odirect", "save torch.save", "save fio", "restore fio"):
        (line,) = [line for line in out.splitlines() if line.startswith(f"| {arm} ")]
        assert "GiB/s" in line
    assert not list(tmp_path.iterdir())
