"""What each kind of storage does: every kind that can be mounted here, tried, as a Markdown table.

    sudo PYTHONPATH=tests python benchmarks/storage_table.py [--only REGEX] > table.md

File systems of 512 MiB on loop devices over a tmpfs, so nothing here is a speed. Needs root.
A kind that cannot be had is listed with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import arms
import numpy as np
from support.filesystems import Filesystems
from support.moto import moto_s3
from support.s3fs import mounted_s3fs

from iobench import linux
from iobench.bench.targets.cold import make_cold
from iobench.environment.probes import Probe, probe_directory
from iobench.errors import IobenchError
from iobench.units import MIB
from iobench.writers import registry
from iobench.writers.base import Writer
from iobench.writers.image import FileImage

PROBES = ("O_DIRECT", "RWF_DONTCACHE", "fallocate", "eviction")
SIZE = 512 * MIB

KINDS = {
    "ext4": ("ext4", "rw"),
    "ext4, data=journal": ("ext4", "data=journal"),
    "xfs": ("xfs", "rw"),
    "btrfs": ("btrfs", "rw"),
    "btrfs, compress": ("btrfs", "compress=zstd"),
    "tmpfs": ("tmpfs", ""),
    "overlay (ext4)": ("overlay", ""),
    "FUSE (bindfs)": ("fuse", ""),
    "FUSE (s3fs)": ("s3fs", ""),
}
"""Each with its file system and the options of the mount."""


@contextlib.contextmanager
def mounted(kind: str, options: str) -> Iterator[Path]:
    """Raises OSError or IobenchError where it cannot be mounted."""
    with contextlib.ExitStack() as undo:
        if kind == "s3fs":
            yield undo.enter_context(mounted_s3fs(undo.enter_context(moto_s3())))
            return
        base = undo.enter_context(tempfile.TemporaryDirectory(prefix="iobench-table-"))
        filesystems = Filesystems(Path(base))
        undo.callback(filesystems.undo)
        yield filesystems.make(kind, SIZE, options=options)


def alignment(directory: Path) -> str:
    with tempfile.TemporaryFile(dir=directory) as file:
        reported = linux.dio_alignment(file.fileno())
    return "not reported" if reported is None else f"{reported.memory} / {reported.offset}"


def short(probe: Probe) -> str:
    if probe.ok:
        kept = re.search(r"; ([\d.]+ \w+) stay cached", probe.detail)
        return "yes" + (f", {kept[1]} stay cached" if kept else "")
    word = re.match(r"E[A-Z]+", probe.detail)
    return f"no: {word[0] if word else probe.detail}"


def tried(writer: Writer, directory: Path) -> tuple[str, list[str]]:
    """What a save and a restore of 24 MiB and some bytes did: the paths, and every fallback."""
    answer = writer.available(directory)
    if not answer.ok:
        return "not available", [answer.reason.replace(str(directory), "here")]
    data = np.random.default_rng(0).integers(0, 256, 24 * MIB + 77, np.uint8)
    back = np.zeros_like(data)
    try:
        wrote = writer.write(FileImage.of("file", [data]), directory)
        make_cold([directory / "file"])
        read = writer.read(FileImage.of("file", [back]), directory)
    except IobenchError as error:
        return "fails", [str(error).replace(str(directory), "here")]
    if not np.array_equal(data, back):
        return "WRONG BYTES", []
    fell = dict.fromkeys((*wrote.fallbacks, *read.fallbacks))
    paths = f"{'+'.join(sorted(wrote.paths))} / {'+'.join(sorted(read.paths))}"
    return paths, [f"{one.wanted} -> {one.used}: {one.reason}" for one in fell]


def print_table(title: str, columns: list[str], rows: dict[str, list[str]]) -> None:
    cells = ([name, *cells] for name, cells in rows.items())
    print(f"\n{title}\n\n{''.join(arms.markdown(['', *columns], cells, '---'))}", end="")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="kinds whose name matches this")
    arguments = parser.parse_args()
    every = {name: registry.writer_class(name) for name in registry.names()}
    writers = [name for name, kind in every.items() if kind.stores and "file" in kind.schemes]
    found: dict[str, list[str]] = {}
    did: dict[str, list[str]] = {}
    missing: dict[str, str] = {}
    notes: list[str] = []
    for kind, mount in KINDS.items():
        if not re.search(arguments.only, kind):
            continue
        try:
            with mounted(*mount) as directory:
                probes = {probe.name: probe for probe in probe_directory(directory)}
                found[kind] = [alignment(directory), *(short(probes[name]) for name in PROBES)]
                all_did = [tried(registry.make(name), directory) for name in writers]
                did[kind] = [shown for shown, _ in all_did]
                notes += [
                    f"- {kind}, `{name}`: {'; '.join(why)}"
                    for name, (_, why) in zip(writers, all_did, strict=True)
                    if why
                ]
        except (OSError, IobenchError) as error:
            missing[kind] = str(error)
    tools = {"mkfs.ext4": "-V", "mkfs.xfs": "-V"}
    tools |= dict.fromkeys(("mkfs.btrfs", "bindfs", "s3fs"), "--version")
    versions = []
    for tool, option in tools.items():
        if shutil.which(tool):
            said = subprocess.run([tool, option], capture_output=True, text=True, check=False)
            versions.append((said.stdout + said.stderr).strip().splitlines()[0])
    print(f"Linux {platform.release()}; {'; '.join(versions)}.")
    print_table("What the kernel reports", ["statx memory / offset", *PROBES], found)
    print_table("What each writer did (save / restore, cold)", writers, did)
    print("\nFallbacks that the writers recorded:\n")
    print("\n".join(notes))
    for kind, why in missing.items():
        print(f"\nNot had: {kind}: {why}")


if __name__ == "__main__":
    main()
