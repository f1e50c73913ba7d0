"""README.md and docs/: every command in a code block is valid, and every block has a test."""

from __future__ import annotations

import functools
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from support.cli import app

from iobench import peers
from iobench.cli.verbs import EXAMPLES

_BLOCKS = re.DOTALL | re.MULTILINE
_ROOT = Path(__file__).parents[2]
_PAGES = [_ROOT / "README.md", _ROOT / "CONTRIBUTING.md", *sorted((_ROOT / "docs").rglob("*.md"))]
_SCRIPT = re.compile(r"benchmarks/(\w+)\.py")
_ENVIRONMENT = re.compile(r"^(?:sudo |[A-Z_]+=\S+ )+")

_PRINTED = "iobench exec:"  # output, not a command
_COMMANDS = {"iobench", "python", "make", "pip", "git"}
_LANGUAGES = {
    "python": "test_docs_python.py, test_tutorials.py, test_verify.py, test_safe_open.py, "
    "test_export.py, test_documented.py of two",
    "sh": "here, like indented commands",
    "text": "test_docs_tables.py: marked as an output",
    "toml": "test_documented.py of writers; here for peers; test_tutorials.py",
    "yaml": "test_schema.py of workloads; test_dlio.py for integrations; here for run-over-ranks",
}
_SHOWN = {
    "checkpointer.md": "test_documented.py of checkpointer",
    "distributed.md": "a drawing",
    "doctor.md": "test_doctor.py",
    "exec.md": "test_redirect.py of integrations",
    "offload.md": "formulas",
    "replicas.md": "a drawing",
    "0038-channel.md": "a drawing",
}
"""Pages with an indented block that is not a command, and the test of that block."""
_SEVERAL = {"offload.md": 2}
"""How many such blocks a page has, if not one."""


def _code_lines(page: Path) -> Iterator[str]:
    """Lines of indented and fenced code blocks; a line that ends with a backslash is joined."""
    text = page.read_text(encoding="utf-8").replace("\\\n", "")
    fenced = re.findall(r"^```(?:sh|text)?\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    indented = re.findall(r"^ {4}(.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M), re.M)
    for line in [*"".join(fenced).splitlines(), *indented]:
        yield _ENVIRONMENT.sub("", line.removeprefix("$ ").strip())


def _commands(first: str, *, optional: bool = True) -> list[Any]:
    """Each command whose first word is `first`: its words, without comment.

    What is in brackets is `optional` and left out, or else a part of the word.
    """
    found: dict[str, Any] = {}
    for page in _PAGES:
        for line in _code_lines(page):
            if line.startswith(f"{first} ") and not line.startswith(_PRINTED):
                plain = re.sub(r"\[[^\]]*\]| > \S+$", "", line) if optional else line
                words = shlex.split(plain, comments=True)[1:]
                found[f"{page.name}: {line}"] = pytest.param(words, id=f"{page.stem}-{line[:60]}")
    return list(found.values())


@functools.cache
def _iobench() -> Any:
    """The command with all its verbs; to build it takes as long as to parse a hundred lines."""
    return typer.main.get_command(app)


def _parse(words: list[str]) -> None:
    """Parse an iobench command; nothing is run. Raises what typer raises for a wrong one."""
    command = _iobench()
    context, rest = command.make_context("iobench", list(words)), list(words)
    while hasattr(command, "commands"):
        _, command, rest = command.resolve_command(context, rest)
        context = command.make_context(command.name, rest, parent=context)


@pytest.mark.parametrize("words", _commands("iobench"))
def test_iobench_parses_it(words: list[str]) -> None:
    """The verb exists, and its options and their values are accepted."""
    _parse(words)


@pytest.mark.parametrize("verb", EXAMPLES)
def test_the_help_of_a_verb(verb: str) -> None:
    """It has three examples, each of which parses, and takes two screens at most."""
    command = _iobench().commands[verb]
    shown = command.get_help(command.make_context(f"iobench {verb}", [], resilient_parsing=True))
    assert len(shown.splitlines()) <= 2 * 50
    assert len(EXAMPLES[verb]) == 3
    for example in EXAMPLES[verb]:
        assert f"    {example}\n" in f"{shown}\n"
        _, *words = shlex.split(example[example.index("iobench") :])
        if words[-1] != "--help":
            _parse(words)


def test_the_help_lists_every_verb_in_a_group() -> None:
    command = _iobench()
    shown = command.get_help(command.make_context("iobench", [], resilient_parsing=True))
    groups = re.findall(r"^(Measure|Read|Use|Manage):$", shown, re.MULTILINE)
    assert groups == ["Measure", "Read", "Use", "Manage"]
    listed = re.findall(r"^  (\w+)  +[A-Z]", shown, re.MULTILINE)
    assert sorted(listed) == sorted(command.commands)
    assert "130 interrupted" in " ".join(shown.split())


@pytest.mark.parametrize("words", [["nope"], ["run", "--nope"], ["show", "--format", "jsn"]])
def test_a_wrong_command_is_found(words: list[str]) -> None:
    """The check itself can fail."""
    with pytest.raises(Exception, match=r"nope|jsn"):
        _parse(words)


@pytest.mark.parametrize("words", [one for one in _commands("python") if one.values[0][0] != "-m"])
def test_the_script_has_the_options(words: list[str]) -> None:
    """The script is in the repository and names each option."""
    script, *rest = words
    source = (_ROOT / script).read_text() + (_ROOT / "benchmarks" / "arms.py").read_text()
    assert [
        option for option in rest if option.startswith("-") and f'"{option}"' not in source
    ] == []


@pytest.mark.parametrize("words", _commands("make"))
def test_make_has_the_target(words: list[str]) -> None:
    """Each `make` command names a target of the Makefile."""
    assert f"\n{words[0]}:" in (_ROOT / "Makefile").read_text()


def _extras() -> set[str]:
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    return set(project["optional-dependencies"])


# In a process of its own: the import of pip switches setuptools' distutils off, and that of the
# standard library, which DeepSpeed's builds then import, warns that it is deprecated.
_PIP = """
import json, sys
from pip._internal.commands import create_command
lines = [(create_command(verb), words) for verb, *words in json.load(sys.stdin)]
json.dump([command.parser.parse_args(words)[1] for command, words in lines], sys.stdout)
"""


def test_pip_takes_the_options_and_finds_the_extras() -> None:
    """`pip install 'iobench[extra]'` or `'.[extra]'`: each extra is one of pyproject.toml."""
    lines = [one.values[0] for one in _commands("pip", optional=False)]
    parsed = subprocess.run(
        [sys.executable, "-c", _PIP], input=json.dumps(lines), capture_output=True, text=True
    )
    assert parsed.returncode == 0, parsed.stderr
    named = set()
    for requirements in json.loads(parsed.stdout):
        for extras in re.findall(r"\[(.*)\]", " ".join(requirements)):
            named |= {*extras.split(",")}
    assert {"report", "s3"} <= named <= _extras()


def test_the_extras_of_the_install_page() -> None:
    page = (_ROOT / "docs" / "install.md").read_text()
    table = page.partition("| extra |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE)) == _extras()


def test_the_entry_point_of_a_peer() -> None:
    """docs/peers.md shows the group that iobench reads."""
    (block,) = re.findall(r"^```toml\n(.*?)^```$", (_ROOT / "docs/peers.md").read_text(), _BLOCKS)
    (group,) = tomllib.loads(block)["project"]["entry-points"]
    assert group == peers.GROUP


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.name)
def test_every_block_has_a_test(page: Path) -> None:
    """Fenced blocks by their language; indented ones by their first word, or by their page.

    What is made from docstrings is left out.
    """
    text = re.sub(r"^<!-- api: .*?^<!-- end -->$", "", page.read_text("utf-8"), flags=_BLOCKS)
    languages = re.findall(r"^```(\w*)\n.*?^```$", text, _BLOCKS)
    assert set(languages) <= set(_LANGUAGES)
    marked = len(re.findall(r"^<!-- output: .* -->\n```text$", text, re.MULTILINE))
    assert languages.count("text") == marked
    plain = re.sub(r"^```.*?^```$", "", text, flags=_BLOCKS)
    shown = [
        block
        for block in re.findall(r"(?:^|(?<=\n\n))((?: {4}.*\n)+)", plain)
        if _ENVIRONMENT.sub("", block.strip()).split()[0] not in _COMMANDS
        or block.strip().startswith(_PRINTED)
    ]
    assert len(shown) == _SEVERAL.get(page.name, page.name in _SHOWN), shown


_LAUNCHERS = ("torchrun ", "srun ", "mpirun ")


def test_launchers_start_a_command_that_parses() -> None:
    """What follows `iobench` in each command. The options of the launchers are not checked."""
    lines = [line for page in _PAGES for line in _code_lines(page) if line.startswith(_LAUNCHERS)]
    assert {line.split()[0] for line in lines} == {one.strip() for one in _LAUNCHERS}
    for line in lines:
        launcher, _, rest = re.sub(r"\s+", " ", line).partition(" iobench ")
        assert rest, line
        assert launcher.startswith("torchrun") == launcher.endswith(" -m"), line
        _parse(shlex.split(rest))


def test_the_job_of_kubernetes() -> None:
    """An Indexed Job whose Service gives the first pod the name at which torchrun meets; as many
    pods as torchrun has nodes, and a command of iobench that parses."""
    page = (_ROOT / "docs/run-over-ranks.md").read_text()
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", page, _BLOCKS)
    service, job = yaml.safe_load_all(block)
    selector = {"job-name": job["metadata"]["name"]}
    assert service["spec"] == {"clusterIP": "None", "selector": selector}
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (spec["completionMode"], spec["backoffLimit"]) == ("Indexed", 0)
    assert pod["subdomain"] == service["metadata"]["name"]
    (container,) = pod["containers"]
    assert all(isinstance(word, str) for word in container["command"])
    options, rest = " ".join(container["command"]).split(" -m iobench ")
    assert f"--nnodes {spec['completions']} " in options
    assert spec["completions"] == spec["parallelism"]
    assert f"--master-addr {job['metadata']['name']}-0.{pod['subdomain']} " in options
    assert "--node-rank $(JOB_COMPLETION_INDEX) " in options
    _parse(rest.split())


def test_benchmarks_that_pages_name_exist() -> None:
    """Also in running text."""
    named = {name for page in _PAGES for name in _SCRIPT.findall(page.read_text())}
    assert "tables" in named
    assert not [name for name in named if not (_ROOT / "benchmarks" / f"{name}.py").exists()]


def test_links_lead_somewhere() -> None:
    """Every relative link of every page, and CONTRIBUTING.md's."""
    links = [
        (page, link)
        for page in [*_PAGES, _ROOT / "CHANGELOG.md"]
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    ]
    assert len(links) > 50
    assert not [(page.name, link) for page, link in links if not (page.parent / link).exists()]
