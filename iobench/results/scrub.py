"""Anonymised copies of result files and tuning journals, for publication.

Only what is listed leaves: the fields of `_known`, numbers, facts of hardware and software,
and texts word by word. A word stays if the source of iobench has it, or if it is a number. Hosts,
places and all other words get a replacement, which is the same wherever they occur.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

from iobench import workloads
from iobench.errors import ResultFileError, TransferError
from iobench.results.codec import KINDS
from iobench.results.file import check_new

_FACT_FIELDS = """
schema kind run_id config_hash fingerprint files_sha256 started_at finished_at at iobench
architecture container distribution driver fs_type governor hypervisor kernel kernel_version model
nvidia_driver nvidia_fs_version product scheduler transparent_hugepage transport write_cache
gpus.name gpus.pci device.name device.disk device.device device.type backing.name backing.disk
backing.device backing.type files.path files.format
"""
_FACTS = frozenset(_FACT_FIELDS.split())
"""Fields, or PARENT.FIELD, whose texts are of hardware, software or iobench: they stay whole."""
_HOSTS = {"hostname", "hosts"}
_PLACES = {"backing_file", "cufile", "endpoint", "mount_point", "path", "source", "target"}
_FREE = {"storages": "storage", "versions": "version"} | dict.fromkeys(
    ("bins", "decisions", "latencies", "options", "paths", "phases_s"), ""
)
"""Objects whose keys writers, packages and targets choose, and the field that each value is."""
_OTHERS = """
aa arm arms asked backgrounds baseline block_size ceiling_jobs crc32 cuda_bindings every
every_asked failure_shape failures_per_1000_node_days floor floor_record gpus_per_node
granularities huge_pages iodepth ioengine label largest_bytes left_out max_bytes max_cpu_s_per_gib
max_memory_bytes max_s measured memcpy_bytes_per_s model_params no_ceiling objective origin
own_server phase pool_bytes precision probe ranks refill_buffers repeat restart_s restore
restore_modes restore_subsets round round_s rules save seed serializers simulated_s
simulates_whole_step spent_s step_scaled steps targets took_s until verb verify writers
written_bytes
"""
"""The free-form parts of records, and the records of journals."""
_OPTIONS_KEPT = {
    *("allocsize", "cache", "commit", "compress", "compress-force", "data", "errors", "index"),
    *("jqfmt", "local_lock", "logbsize", "lookupcache", "metacopy", "minorversion", "mode"),
    *("nfs_export", "proto", "redirect_dir", "sec", "space_cache", "stripe", "vers", "xino"),
}
"""Mount options whose value says nothing about a person or a network."""
_AMOUNT = re.compile(r"[0-9]+[kKmMgG%]?")
_OWNER = re.compile(r"uid|gid|user|group")
_PUBLIC = re.compile(
    r"[/.]|/(?:proc|sys)(?:/.*)?|(?:/dev/)?(?:(?:[svx]v?d|hd)[a-z]+[0-9]*|(?:md|dm-|loop|zram|pmem|nbd"
    r"|rbd|ram)[0-9]+(?:p[0-9]+)?|(?:nvme[0-9]+n|mmcblk)[0-9]+(?:p[0-9]+)?)|/dev/(?:shm|fuse|null)"
    r"|https?://(?:127\.[0-9.]+|localhost|s3[.-][a-z0-9-]+\.amazonaws\.com)(?::[0-9]+)?/?"
)
"""Places that are alike everywhere, such as names of the kernel's (/dev/mapper has others)."""
_WORD = re.compile(r"[^\s'\"(),;=\[\]{}<>|`]+")
_SAFE = re.compile(
    r"[-+]?[0-9]+(?:[./x:][0-9]+)?(?:[kKMGT]?i?B?(?:/s)?|%|ms|s|min|h|d|x|xpersist)|--[a-z-]+|\W+"
)
"""Numbers with their units, options of a command, and punctuation."""
HOST_REPLACED = re.compile(r"host[0-9]*")
"""What stands for a host in a copy: another one in each record, under the same name."""
_VERSION = re.compile(r"(?:glibc )?[0-9A-Za-z.+_-]{1,40}")
_REPLACED = re.compile(r"(?:host|removed|source|workload|/path|[a-z0-9]+://place)[0-9]*")


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


def scrub(lines: Iterable[bytes]) -> Scrubbed:
    """Return the lines of a record without what may identify its owner.

    A line in which nothing is replaced keeps its bytes. `lines` are those of a file that its reader
    accepts.
    """
    given = [(line, json.loads(line) if line.strip() else None) for line in lines]
    copy = _Copy()
    for _, values in given:  # hosts and places, which texts may contain
        copy.clean(values)
    copy.learning = False
    cleaned = [copy.clean(values) for _, values in given]
    return Scrubbed(
        lines=tuple(
            line if new == values else f"{json.dumps(new)}\n".encode("ascii")
            for (line, values), new in zip(given, cleaned, strict=True)
        ),
        removed=tuple(copy.removed.values()),
    )


def write_scrubbed(
    path: Path, output: Path, check: Callable[[Path], object]
) -> tuple[Removed, ...]:
    """Write an anonymised copy of `path` to `output`, and return what it does not contain.

    `check` reads a file of this kind; it is called for both. Raises ResultFileError if one cannot
    be read, or `output` exists or cannot be written. No output stays after an error.
    """
    check_new(output)
    check(path)
    scrubbed = scrub(_lines(path.read_bytes()))
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
class _Copy:
    """What was replaced in the lines so far. While `learning`, only hosts and places are."""

    learning: bool = True
    replaced: dict[str, str] = field(default_factory=dict)
    numbers: Counter[str] = field(default_factory=Counter)
    removed: dict[str, Removed] = field(default_factory=dict)

    def clean(self, value: Any, key: str = "", parent: str = "", where: str = "") -> Any:
        """Return `value`, that of the field `key` of `parent`, with what is listed below it."""
        if isinstance(value, Mapping):
            cleaned = {}
            for name, one in value.items():
                path = f"{where}.{name}" if where else name
                if key in _FREE:
                    kept = self._place(name, key) if key == "storages" else self._words(name, path)
                    cleaned[self._note(path, name, kept)] = self.clean(one, _FREE[key], key, path)
                elif name not in _known() or (
                    name == "files"  # of a plan: their paths are public in the catalogue
                    and isinstance(one, list)
                    and value.get("workload") not in workloads.names()
                ):
                    self._note(path, f"{json.dumps(one):.60}", "left out")
                else:
                    cleaned[name] = self.clean(one, name, key, path)
            return cleaned
        if isinstance(value, list):
            return [self.clean(one, key, parent, where) for one in value]
        return self._text(value, key, parent, where) if isinstance(value, str) else value

    def _text(self, text: str, key: str, parent: str, where: str) -> str:
        if key in _FACTS or f"{parent}.{key}" in _FACTS or _REPLACED.fullmatch(text) or not text:
            return text
        if key == "version" and _VERSION.fullmatch(text):
            return text
        if key in _HOSTS:
            new = self._new("host", text)
        elif key in _PLACES:
            new = self._place(text, key)
        elif key == "workload" or f"{parent}.{key}" == "workload.name":
            new = text if text in workloads.names() else self._new("workload", text)
        elif key == "mount_options":
            new = _mount_option(text)
        else:
            return self._words(text, where)
        return self._note(where, text, new)

    def _place(self, text: str, key: str) -> str:
        scheme, separator, _ = text.partition("://")
        if _PUBLIC.fullmatch(text) or ("/" not in text and text in _vocabulary()):
            return text
        kind = "source" if key == "source" else "/path"
        return self._new(f"{scheme}://place" if separator else kind, text)

    def _words(self, text: str, where: str) -> str:
        """Return `text` with the words that iobench itself writes, and others replaced."""
        if self.learning:
            return text

        def word(found: re.Match[str]) -> str:
            core = found[0].strip(".:!?")
            ours = _is_ours(core) or _PUBLIC.fullmatch(core) or _REPLACED.fullmatch(core)
            if not core or (ours and not ("/" in core and core in self.replaced)):
                return found[0]
            return found[0].replace(core, self._note(where, core, self._new("removed", core)), 1)

        return _WORD.sub(word, text)

    def _new(self, kind: str, text: str) -> str:
        """Return the replacement of `text`: `KIND`, `KIND2`, ..."""
        if text not in self.replaced:
            self.numbers[kind] += 1
            number = self.numbers[kind]
            self.replaced[text] = f"{kind}{number if number > 1 else ''}"
        return self.replaced[text]

    def _note(self, where: str, old: str, new: str) -> str:
        if new != old and not self.learning:
            first = self.removed.get(old, Removed(where=where, old=old, new=new, count=0))
            self.removed[old] = replace(first, count=first.count + 1)
        return new


def _mount_option(text: str) -> str:
    name, separator, value = text.partition("=")
    plain = name in _OPTIONS_KEPT or _AMOUNT.fullmatch(value)
    return f"{name}=removed" if separator and (_OWNER.search(name) or not plain) else text


def _is_ours(word: str) -> bool:
    """Whether a word is one of iobench's, a number, or at most three of them: `peer:dcp`."""
    parts = [word] if word in _vocabulary() else re.split("[:+]", word)
    return len(parts) <= 3 and all(
        one in _vocabulary() or _SAFE.fullmatch(one) is not None for one in parts
    )


@cache
def _vocabulary() -> frozenset[str]:
    """The words of iobench's source, and of its workloads: messages are made of them.

    The places in examples, such as ./checkpoint-1000, are also those of users.
    """
    found = set(workloads.names())
    for path in Path(__file__).parents[1].rglob("*.py"):
        found.update(one.strip(".:!?") for one in _WORD.findall(path.read_text("utf-8")))
    return frozenset(one for one in found if not one.startswith("/"))


@cache
def _known() -> frozenset[str]:
    """Return the names of all fields that iobench writes."""
    found = {*_OTHERS.split(), *_HOSTS, *_PLACES, *(one.rpartition(".")[2] for one in _FACTS)}
    todo: list[Any] = list(KINDS.values())
    seen = set()
    while todo:
        kind = todo.pop()
        todo += get_args(kind)
        if dataclasses.is_dataclass(kind) and kind not in seen:
            seen.add(kind)
            found |= {field.name for field in dataclasses.fields(kind)}
            todo += get_type_hints(kind).values()
    return frozenset(found)
