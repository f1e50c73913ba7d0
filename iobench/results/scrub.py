"""Anonymised copies of result files and tuning journals, for publication.

Host names, paths, users, addresses and identifying mount options get a replacement, which is the
same wherever the value occurs. Everything else keeps its bytes: figures, times and options.
"""

from __future__ import annotations

import io
import ipaddress
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from iobench import workloads
from iobench.errors import ResultFileError, TransferError
from iobench.results.file import check_new
from iobench.results.known_fields import unknown_fields

__all__ = ["HOST_REPLACED", "Removed", "Scrubbed", "scrub", "write_scrubbed"]

_STRUCTURE = {
    *("schema", "kind", "run_id", "config_hash", "fingerprint", "operation", "status", "mode"),
    *("phase", "origin", "counter", "method", "started_at", "finished_at", "at", "writer", "verb"),
    *("versions", "kernel", "kernel_version", "distribution"),
}
"""Keys of words, times and versions, which stay: a host may be called `save`."""
_OWNER_KEYS = {"email", "mac", "serial", "user", "username", "uuid", "wwid", "wwn"}
_PLACE_KEYS = {"backing_file", "endpoint", "mount_point", "path", "target"}
_OPTIONS_KEPT = {
    *("allocsize", "cache", "commit", "compress", "compress-force", "data", "errors", "index"),
    *("jqfmt", "local_lock", "logbsize", "lookupcache", "metacopy", "minorversion", "mode"),
    *("nfs_export", "proto", "redirect_dir", "sec", "space_cache", "stripe", "vers", "xino"),
}
"""Mount options whose value says nothing about a person or a network."""
_AMOUNT = re.compile(r"[0-9]+[kKmMgG%]?")
_OWNER = re.compile(r"uid|gid|user|group")
_KERNELS = re.compile(
    r"/(?:proc|sys)(?:/.*)?|/dev/(?:(?:[svx]v?d|hd)[a-z]+[0-9]*|(?:nvme[0-9]+n|mmcblk)[0-9]+(?:p[0-9]+)?"
    r"|(?:md|dm-|loop|zram|pmem|nbd|rbd|ram)[0-9]+(?:p[0-9]+)?|shm|fuse|null)"
)
"""Paths and device names that the kernel chooses. /dev/mapper and /dev/disk have other names."""
_PUBLIC_URL = re.compile(
    r"https?://(?:127\.[0-9.]+|localhost|s3[.-][a-z0-9-]+\.amazonaws\.com)(?::[0-9]+)?/?"
)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_FILE = re.compile(r".*(\.(?:csv|html|jsonl?|md|png|svg|toml|ya?ml))")
_TAKES_PLACE = {"-o", "--output", "--target", "--results", "--journal", "--resume", "--report"}
_HOME = re.compile(r"/(?:homes?|Users|users)/([^/]+)")
_COMMON = {"admin", "debian", "localhost", "nobody", "root", "runner", "ubuntu", "user", "users"}
_SHORTEST_WORD = 2  # a shorter name would be found inside sentences

_TAIL = r"[^\s'\"<>,;:()\[\]{}|=]*"
_MORE = r"(?: [^\s'\"<>,;:()\[\]{}|=/~]+/[^\s'\"<>,;:()\[\]{}|=]*)*"
"""More words of a path that is not quoted and contains spaces: `/mnt/my disk/run 1/x`."""
_GENERAL = (
    r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>,;)\]}]+"
    r"|(?<=')(?:~|\.{1,2})?/[^'/][^']*(?=')|(?<=\")(?:~|\.{1,2})?/[^\"/][^\"]*(?=\")"
    rf"|(?<![\w.~/@-])[A-Za-z0-9][\w.-]*:/(?!/){_TAIL}{_MORE}"
    rf"|(?<![\w.~/-])(?:~|\.{{1,2}})?/(?!/)[^\s'\"<>,;:()\[\]{{}}|=]{_TAIL}{_MORE}"
    r"|(?<![\w.:])(?:[0-9]{1,3}(?:\.[0-9]{1,3}){3}|[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,7})"
    r"(?![\w.:])"
)
"""A URL, the source of a mount, a path (quoted, any part may contain spaces), or an IP address."""
_HOST = r"(?<=\(host )[\w.-]+|(?<=on host )[\w.-]+|(?<=server )[\w.-]+(?= (?:not responding|OK))"
"""A host in a message of iobench, or of the kernel's NFS client."""
_EXPORT = re.compile(r"[A-Za-z0-9][\w.-]*:/(?!/)")
HOST_REPLACED = re.compile(r"host[0-9]*")
"""What stands for a host in a copy: another one in each record, under the same name."""


@dataclass(frozen=True, kw_only=True)
class Removed:
    """A value that was replaced: where it occurs first, and in how many texts."""

    where: str
    old: str
    new: str
    count: int


@dataclass(frozen=True, kw_only=True)
class Scrubbed:
    """The lines of the copy, and the values that are not in it any more."""

    lines: tuple[bytes, ...]
    removed: tuple[Removed, ...]


def scrub(lines: Iterable[bytes], users: Iterable[str] = ()) -> Scrubbed:
    """Return the lines of a record without what identifies its owner.

    `users` are names to remove in addition to those that the paths show. A line in which nothing is
    replaced keeps its bytes. `lines` are those of a file that its reader accepts.
    """
    given = [(line, json.loads(line) if line.strip() else None) for line in lines]
    names = _Names(vocabulary={word for _, values in given for word in _words("", values)})
    for _, values in given:
        _learn_workload(names, values)
        _learn(names, "", values)
    for user in users:
        names.word("user", user)
    for _ in range(2):  # the first time learns from the paths in texts
        names.compile()
        cleaned = [_clean(names, "", values, "") for _, values in given]
    return Scrubbed(
        lines=tuple(
            line if new == values else f"{json.dumps(new)}\n".encode("ascii")
            for (line, values), new in zip(given, cleaned, strict=True)
        ),
        removed=names.removed(),
    )


def write_scrubbed(
    path: Path, output: Path, check: Callable[[Path], object], users: Iterable[str] = ()
) -> tuple[Removed, ...]:
    """Write an anonymised copy of `path` to `output`, and return what it does not contain.

    `check` reads a file of this kind; it is called for both. Raises ResultFileError if one cannot
    be read, or `output` exists or cannot be written. No output stays after an error.
    """
    check_new(output)
    check(path)
    lines = _lines(path.read_bytes())
    for number, line in enumerate(lines, 1):
        if unknown := next(unknown_fields(json.loads(line) if line.strip() else None), None):
            raise ResultFileError(
                f"{path}, line {number}: the field {unknown!r} is unknown here and may identify "
                "you: nothing was written; remove it from a copy of the record, and scrub that"
            )
    scrubbed = scrub(lines, users)
    try:
        file = output.open("xb")
    except OSError as error:
        raise ResultFileError(f"{output} cannot be written: {error.strerror}") from error
    try:
        with file:
            file.writelines(scrubbed.lines)
            file.flush()
            os.fsync(file.fileno())
        check(output)
    except BaseException as error:
        output.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise TransferError.wrap(error, "writing", output) from error
        raise
    return scrubbed.removed


def _lines(data: bytes) -> list[bytes]:
    """Return the lines, without the unfinished last one that a killed tuning leaves."""
    lines = list(io.BytesIO(data))
    try:
        json.loads(lines[-1])
    except ValueError:
        return lines[:-1]
    return lines


@dataclass(kw_only=True)
class _Names:
    """What identifies the owner of a record, with its replacements."""

    known: dict[str, str] = field(default_factory=dict)
    vocabulary: set[str] = field(default_factory=set)
    _replaced: dict[str, Removed] = field(default_factory=dict)
    _numbers: Counter[str] = field(default_factory=Counter)
    _pattern: re.Pattern[str] = field(init=False)

    def learn(self, kind: str, text: str, suffix: str = "") -> str:
        """Return the replacement of `text`: `KIND`, `KIND2`, ... with `suffix`."""
        if text not in self.known:
            self._numbers[kind] += 1
            number = self._numbers[kind]
            self.known[text] = f"{kind}{number if number > 1 else ''}{suffix}"
        return self.known[text]

    def word(self, kind: str, text: str, suffix: str = "") -> None:
        """Learn a name that other texts may contain."""
        usual = {*_COMMON, *self.vocabulary}
        if len(text) >= _SHORTEST_WORD and text not in usual and not text.isdecimal():
            self.learn(kind, text, suffix)

    def host(self, text: str) -> None:
        """Learn a host, its first label and its domain."""
        label, _, domain = text.partition(".")
        if not _is_address(text):
            for part in (text, label, domain):
                self.word("host", part)

    def place(self, text: str) -> str:
        """Return the replacement of a path or URL, and learn the user, host or bucket in it."""
        if text in self.known or text.strip("./~") == "" or _KERNELS.fullmatch(text):
            return self.known.get(text, text)
        for user in _HOME.findall(text):
            self.word("user", user)
        scheme, separator, rest = text.partition("://")
        if separator:
            if _PUBLIC_URL.fullmatch(text):
                return text
            self.host(rest.partition("/")[0].rpartition("@")[2].partition(":")[0])
            return self.learn(f"{scheme}://place", text)
        ending = _FILE.fullmatch(text)
        kind = "/path" if text.startswith(("/", "~", ".")) else "file"
        return self.learn(kind, text, ending[1] if ending else "")

    def source(self, text: str) -> None:
        """Learn the source of a mount: `/dev/mapper/NAME`, `HOST:/export`, `//HOST/share`."""
        if text.startswith("//"):
            self.host(text[2:].partition("/")[0])
        elif not text.startswith("/") and ":" in text:
            self.host(text.partition(":")[0].partition("@")[0])
        if ("/" in text or ":" in text) and not _KERNELS.fullmatch(text):
            self.learn("source", text)

    def option(self, text: str) -> None:
        """Learn a mount option with a value that is not a known setting of a file system."""
        name, separator, value = text.partition("=")
        plain = name in _OPTIONS_KEPT or _AMOUNT.fullmatch(value)
        if separator and (_OWNER.search(name) or not plain):
            self.known[text] = f"{name}=removed"
            if "user" in name:
                self.word("user", value)

    def command(self, words: list[Any]) -> None:
        """Learn the paths and files among the words of a command line."""
        for before, word in itertools.pairwise(["", *map(str, words)]):
            value = word.partition("=")[2] if word.startswith("-") else word
            for part in value.split(",") if before in _TAKES_PLACE or "/" in value else [value]:
                one = part if _is_place(part) else part.rpartition("=")[2]
                if "/" in one:
                    self.place(one)
                elif before in _TAKES_PLACE or _FILE.fullmatch(one):
                    ending = _FILE.fullmatch(one)
                    self.word("file", one, ending[1] if ending else "")

    def clean(self, text: str, where: str) -> str:
        """Return `text` with every known name, path, URL and address replaced."""
        if text in self.known:
            return self._note(text, self.known[text], where)

        def replacement(found: re.Match[str]) -> str:
            old = found[0]
            if old in self.known:
                new = self.known[old]
            elif found.lastgroup and not HOST_REPLACED.fullmatch(old):
                self.host(old)
                new = self.known.get(old, old)
            elif _EXPORT.match(old):
                self.source(old)
                new = self.known[old]
            elif "/" in old:
                new = self.place(old)
            else:
                new = self.learn("address", old) if _is_private(old) else old
            return old if new == old else self._note(old, new, where)

        return self._pattern.sub(replacement, text)

    def compile(self) -> None:
        """Make the pattern of all known values, the longest first, and of unknown paths."""
        places = sorted((one for one in self.known if "/" in one), key=len, reverse=True)
        words = sorted((one for one in self.known if "/" not in one), key=len, reverse=True)
        parts = [rf"(?<![\w.~/-]){re.escape(one)}(?![\w-]){_TAIL}{_MORE}" for one in places]
        parts.append(_GENERAL)
        parts += [rf"(?<![A-Za-z0-9]){re.escape(one)}(?![A-Za-z0-9])" for one in words]
        domains = [re.escape(one) for one in words if HOST_REPLACED.fullmatch(self.known[one])]
        others = rf"(?<![A-Za-z0-9.-])(?:[\w-]+\.)+(?:{'|'.join(domains)})(?![\w-])|" * bool(
            domains
        )
        parts.append(f"(?P<host>{others}{_HOST})")
        self._pattern, self._replaced = re.compile("|".join(parts)), {}

    def _note(self, old: str, new: str, where: str) -> str:
        if new == old:  # a copy that is scrubbed again
            return new
        first = self._replaced.get(old, Removed(where=where, old=old, new=new, count=0))
        self._replaced[old] = replace(first, count=first.count + 1)
        return new

    def removed(self) -> tuple[Removed, ...]:
        """Return what was replaced, in order of occurrence."""
        return tuple(self._replaced.values())


def _learn_workload(names: _Names, record: Any) -> None:
    """Learn the name of a workload that is not in the catalogue, and the paths of its files."""
    if not isinstance(record, Mapping):
        return
    facts, plan = record.get("workload"), record.get("plan") or record.get("asked") or {}
    name = facts["name"] if isinstance(facts, Mapping) else plan.get("workload", "")
    if name and name not in workloads.names():
        names.word("workload", name)
        for file in plan.get("files", ()):
            names.learn("file", file["path"])


def _learn(names: _Names, key: str, value: Any) -> None:
    """Learn from the fields that hold names and places, and from all below `value`."""
    if key in _STRUCTURE:
        return
    if isinstance(value, Mapping):
        for name, one in value.items():
            if _is_place(name):
                names.place(name)
            _learn(names, name, one)
    elif isinstance(value, list):
        if key == "command":
            names.command(value)
        for one in value:
            _learn(names, key, one)
    elif isinstance(value, str) and value:
        if key in ("hostname", "hosts"):
            names.host(value)
            names.learn("host", value)
        elif key == "source":
            names.source(value)
        elif key == "mount_options":
            names.option(value)
        elif key in _OWNER_KEYS:
            names.learn("removed", value)
        elif key in _PLACE_KEYS and _is_place(value):
            names.place(value)


def _clean(names: _Names, key: str, value: Any, where: str) -> Any:
    """Return `value` with all texts below it cleaned."""
    if key in _STRUCTURE:
        return value
    if isinstance(value, Mapping):
        return {
            names.clean(name, where) if _is_place(name) else name: _clean(
                names, name, one, f"{where}.{name}" if where else name
            )
            for name, one in value.items()
        }
    if isinstance(value, list):
        return [_clean(names, key, one, where) for one in value]
    return names.clean(value, where) if isinstance(value, str) else value


def _words(key: str, value: Any) -> Iterator[str]:
    """Yield the keys, and the values of `_STRUCTURE`: words of iobench, which must stay."""
    if isinstance(value, Mapping):
        yield from value
        for name, one in value.items():
            yield from _words(name, one)
    elif isinstance(value, list):
        for one in value:
            yield from _words(key, one)
    elif isinstance(value, str) and key in _STRUCTURE:
        yield value


def _is_place(text: str) -> bool:
    return text.startswith(("/", "~/", "./", "../")) or _SCHEME.match(text) is not None


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _is_private(text: str) -> bool:
    """Whether `text` is an IP address that names a machine."""
    if not _is_address(text):
        return False
    address = ipaddress.ip_address(text)
    return not (address.is_loopback or address.is_unspecified)
