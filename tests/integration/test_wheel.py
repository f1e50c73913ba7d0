"""The built wheel in a virtual environment with its requirements only."""

import re
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from support.captured import captured

from iobench import __version__

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that `pip install .` builds."""
    directory = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "-d", directory]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=60)
    (found,) = directory.glob("*.whl")
    return found


def _required(wheel: Path) -> set[str]:
    """The distributions that pip installs with `wheel`, by its declared requirements."""
    (info,) = (one for one in zipfile.Path(wheel).iterdir() if one.name.endswith(".dist-info"))
    found: set[str] = set()
    todo = [("", frozenset[str]())]
    while todo:
        name, extras = todo.pop()
        if name in found and not extras:
            continue
        found.add(name)
        for text in (metadata.requires(name) if name else _stated(info)) or ():
            wanted = Requirement(text)
            if wanted.marker is None or any(
                wanted.marker.evaluate({"extra": extra}) for extra in extras or {""}
            ):
                todo.append((wanted.name, frozenset(wanted.extras)))
    return found - {""}


def _stated(info: zipfile.Path) -> list[str]:
    return metadata.PathDistribution(info).requires or []


def _link(name: str, site: Path) -> None:
    """Make the distribution `name` available in the directory `site`."""
    distribution = metadata.distribution(name)
    for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
        if not (site / top).exists():
            (site / top).symlink_to(Path(str(distribution.locate_file(top))))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the programs of an environment with the wheel and its requirements."""
    base = tmp_path_factory.mktemp("installed")
    venv.create(base, symlinks=True)
    (site,) = base.glob("lib/python*/site-packages")
    for name in _required(wheel):
        _link(name, site)
    python = base / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps"]
    subprocess.run([*install, "--no-index", wheel], check=True, capture_output=True, timeout=60)
    return python.parent


def test_the_page_on_pypi_has_no_relative_links(wheel) -> None:
    """Pictures and links of README.md name the repository: PyPI has no files around the page."""
    (info,) = (one for one in zipfile.Path(wheel).iterdir() if one.name.endswith(".dist-info"))
    page = (info / "METADATA").read_text(encoding="utf-8")
    links = re.findall(r'\]\(([^)]*)\)|(?:src|srcset)="([^"]*)"', page)
    assert len(links) > 10
    assert [one for pair in links if (one := "".join(pair)) and ":" not in one] == []


def test_contents(wheel) -> None:
    """Every file of the package is in the wheel, the workloads' YAML included."""
    package = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "iobench").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert "iobench/workloads/llama7b.yaml" in package
    assert package <= set(zipfile.ZipFile(wheel).namelist())


def test_citation() -> None:
    """CITATION.cff is YAML and names this version."""
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__


def test_run(installed, tmp_path) -> None:
    """`iobench run` measures a named workload with no other packages; `report` names its extra."""
    where = captured(
        [installed / "python", "-c", "import iobench; print(iobench.__file__)"],
        cwd=tmp_path,
        check=True,
    )
    assert Path(where.stdout.strip()).is_relative_to(installed.parent)
    chosen = ["--workload", "llama7b", "--writer", "buffered", "--size", "16MiB"]
    done = captured(
        [installed / "iobench", "run", *chosen, "--repeat", "1", "--no-fio"],
        cwd=tmp_path,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "buffered" in done.stdout
    (record,) = tmp_path.glob("results/*.jsonl")
    refused = captured(
        [installed / "iobench", "show", record, "-o", "a.html"], cwd=tmp_path, timeout=60
    )
    assert refused.returncode == 3
    assert refused.stderr.endswith(" is not installed. Type: pip install 'iobench[report]'.\n")
    assert refused.stderr.count("\n") == 1
