"""`make docs`: the site has every page and name, and asks no other host; mistakes fail."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from urllib.parse import urlsplit

from support.captured import captured

_ROOT = Path(__file__).parents[2]
_PAGES = [_ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
_PAGES += sorted((_ROOT / "docs").rglob("*.md"))


def build(source: Path, output: Path) -> subprocess.CompletedProcess[str]:
    """Build the site as the Makefile does."""
    (target,) = re.findall(r"^docs:.*\n\t\$\(bin\)/python (.*)$", _makefile(), re.MULTILINE)
    words = target.removesuffix(" . site $(ARGS)").replace("docs", str(_ROOT / "docs")).split()
    return captured([sys.executable, *words, source, output], cwd=source, timeout=280)


def _makefile() -> str:
    return (_ROOT / "Makefile").read_text()


class _Urls(HTMLParser):
    """What a page links to, and what a browser loads by itself: scripts, styles, icons, images."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        loading = {"src", "srcset", "data"}
        if tag in ("link", "image", "use"):
            loading.add("href")
        self.loads += [value for name, value in attrs if name in loading and value]
        self.links += [value for name, value in attrs if tag == "a" and name == "href" and value]


def test_the_site(tmp_path) -> None:
    """Pages, reports and public names are there and linked; nothing is loaded from elsewhere.

    One test, because a build takes 18 s of CPU.
    """
    site = tmp_path / "site"
    done = build(_ROOT, site)
    assert done.returncode == 0, done.stderr
    linked = _check_urls(site) | {site / "README.html"}
    built = {site / path.relative_to(_ROOT).with_suffix(".html") for path in _PAGES}
    records = (path.stem for path in (_ROOT / "results").glob("reference-*.jsonl"))
    reports = {site / "reports" / f"{name}.html" for name in records}
    assert not (built | reports) - linked
    assert not [path for path in reports if str(_ROOT) in path.read_text()]
    for style in site.rglob("*.css"):
        assert not re.search(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", style.read_text()), style
    for module in ("iobench", "iobench.writers"):
        page = (site / "docs" / "api" / f"{module}.html").read_text()
        for name in import_module(module).__all__:
            assert name.startswith("__") or f'<span class="pre">{name}</span>' in page, name


def _check_urls(site: Path) -> set[Path]:
    """Every file that a page loads is in the site, and every link inside it leads to a file.

    Returns these files.
    """
    linked: set[Path] = set()
    for page in [*site.glob("*.html"), *(site / "docs").rglob("*.html")]:
        urls = _Urls()
        urls.feed(page.read_text())
        assert urls.loads
        for url in map(urlsplit, urls.loads):
            assert not url.netloc, (page, url.geturl())
            assert url.scheme == "data" or (page.parent / url.path).exists(), (page, url.geturl())
        inside = [url.path for url in map(urlsplit, urls.links) if not url.netloc and url.path]
        linked |= {Path(os.path.normpath(page.parent / path)) for path in inside}
    assert not [path for path in linked if not path.exists()]
    return linked


def test_mistakes_fail(tmp_path) -> None:
    """A link to no page, an anchor to no heading and a record that cannot be read: all are named.
    A record of the user's own is not read."""
    (tmp_path / "docs").mkdir()
    text = "# Title\n\n[a](docs/missing.md) [b](docs/page.md#nowhere) [c](docs/page.md#part)\n"
    (tmp_path / "README.md").write_text(text)
    (tmp_path / "docs" / "page.md").write_text("# Page\n\n## Part\n")
    (tmp_path / "results").mkdir()
    for name in ("reference-torn.jsonl", "own.jsonl"):
        (tmp_path / "results" / name).write_text("{")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    for found in ("docs/missing.md", "'nowhere'", "reference-torn"):
        assert found in done.stderr
    assert "own.jsonl" not in done.stderr
    assert "'part'" not in done.stderr
