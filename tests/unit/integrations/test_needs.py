"""The message of an integration whose framework is not installed or too old."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from contextlib import nullcontext
from pathlib import Path

import pytest

from iobench.integrations.needs import needs

_CODE = """
import sys
sys.path.insert(0, sys.argv[1])
try:
    import iobench.integrations.transformers
except ImportError as error:
    print(error)
sys.path.pop(0)
for framework in ("accelerate", "deepspeed", "dlio_benchmark", "lightning", "transformers"):
    sys.modules[framework] = None
    try:
        __import__(f"iobench.integrations.{framework.removesuffix('_benchmark')}")
    except ImportError as error:
        print(error)
"""


def test_other_failures_are_themselves() -> None:
    """A module that is missing inside the framework is another error."""
    with (
        pytest.raises(ModuleNotFoundError, match="no_such_module"),
        needs("lightning", "lightning"),
    ):
        importlib.import_module("no_such_module")


def _install(directory: Path, version: str) -> None:
    """Put a `transformers` of this version, without the names of another one, on the path."""
    (directory / "transformers").mkdir()
    (directory / "transformers" / "__init__.py").touch()
    (directory / "transformers" / "trainer.py").touch()
    metadata = directory / f"transformers-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: transformers\nVersion: {version}\n"
    )


@pytest.mark.slow
def test_each_names_what_to_install(tmp_path: Path) -> None:
    """One line with pip's command, for every framework. Transformers 4 lacks names that the
    integration imports."""
    _install(tmp_path, "4.57.1")
    command = [sys.executable, "-c", _CODE, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    old, *lines = done.stdout.splitlines()
    assert old == (
        "this integration of iobench needs transformers>=5, and transformers 4.57.1 is installed: "
        "pip install 'transformers>=5'"
    )
    frameworks = ("accelerate", "deepspeed", "dlio_benchmark", "lightning", "transformers")
    for line, framework in zip(lines, frameworks, strict=True):
        assert f"needs {framework}: pip install '{framework}" in line


@pytest.mark.parametrize(("version", "enough"), [("0.9.4", False), ("0.17.0rc1+cu128", True)])
def test_versions_are_compared_as_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, enough: bool
) -> None:
    """0.9 is older than 0.17, which its release candidate is not."""
    _install(tmp_path, version)
    monkeypatch.syspath_prepend(tmp_path)
    expected = pytest.raises(ImportError, match=f"transformers {version} is installed")
    with nullcontext() if enough else expected, needs("transformers", "transformers>=0.17"):
        pass


def test_extras_install_what_the_integrations_need() -> None:
    """The extra `integrations` and `needs` name the same versions."""
    root = Path(__file__).parents[3]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for framework in ("accelerate", "lightning", "transformers"):
        source = (root / f"iobench/integrations/{framework}.py").read_text()
        (given,) = (one for one in extras["integrations"] if one.startswith(framework))
        assert f'needs("{framework}", "{given}")' in source
