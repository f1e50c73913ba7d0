"""Directories: what belongs together, and what is missing or too much in it."""

from __future__ import annotations

import posixpath
import re
from collections import defaultdict
from collections.abc import Iterable
from itertools import accumulate, product

from iobench.checkpoint.manifest import MANIFEST, FileRecord, Manifest, step_of
from iobench.errors import DataMismatchError, TransferError
from iobench.verification import dcp
from iobench.verification.inventory import CheckedRange, FileTree, VerifyInventory, unreadable
from iobench.verification.tensor_files import add_file, has_tensors

SIDECAR = "iobench-verify.json"
"""The file that `iobench verify --record` writes: a manifest of all files."""

_INDEX = ".index.json"
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.(safetensors|bin)")
_TOKENIZERS = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt"),
    *("spiece.model", "sentencepiece.bpe.model", "tekken.json"),
)
_DEEPSPEED = re.compile(
    r"(?:((?:bf16_)?zero_pp_rank_)(\d+)_)?mp_rank_(\d+)_(optim|model)_states\.pt"
)
_POINTERS = {"latest": "{}", "latest_checkpointed_iteration.txt": "iter_{:0>7}"}
"""Files of DeepSpeed and Megatron that name the newest checkpoint of their directory."""


def inventory_of(location: FileTree, *, headers_only: bool = False) -> VerifyInventory:
    """Return the files and tensors of `location`, and what is wrong with their indexes.

    With `headers_only`, JSON that is no index of tensors is not read.
    """
    inventory = VerifyInventory(location=location)
    if location.single:
        (path,) = inventory.sizes
        if has_tensors(path):
            add_file(inventory, path)
        return inventory
    folders = {posixpath.dirname(path) for path in inventory.sizes}
    for folder in sorted({"", *folders}):
        names = inventory.below(folder)
        if MANIFEST in names and _add_own(inventory, folder):
            continue
        if dcp.METADATA in names or any(name.endswith(dcp.DATA) for name in names):
            dcp.add_directory(inventory, folder)
        _check_step(inventory, folder, names)
        for name in names:
            if has_tensors(name):
                add_file(inventory, _in(folder, name))
        _check_folder(inventory, folder, names, headers_only=headers_only)
    return inventory


def _in(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _is_data(name: str) -> bool:
    return has_tensors(name) or name.endswith(dcp.DATA)


def _check_step(inventory: VerifyInventory, folder: str, names: Iterable[str]) -> None:
    """A directory `step-N` with our files, but without a manifest, is no checkpoint."""
    own = {"state.json", "tensors.safetensors"} & {*names}
    if own and step_of(posixpath.basename(folder)) is not None and MANIFEST not in names:
        inventory.error(_in(folder, MANIFEST), "is missing: this is no complete checkpoint")


def _add_own(inventory: VerifyInventory, folder: str) -> bool:
    """Add a checkpoint of iobench; return whether it is one."""
    path = _in(folder, MANIFEST)
    try:
        manifest = Manifest.parse(inventory.location.read(path), path)
    except (DataMismatchError, TransferError) as error:
        if {"state.json", "tensors.safetensors"} & {*inventory.below(folder)}:
            inventory.error(path, unreadable(error).removeprefix(f"{path}: "))
            return True
        return False  # another program's file of this name
    inventory.found("iobench")
    faults = len(inventory.findings)
    for record in manifest.files:
        add_record(inventory, folder, record)
    for pinned in manifest.pinned:
        inventory.unproved[path] = (
            f"its optimizer is a generation in {pinned.directory}: iobench offload show"
        )
    named = {record.path for record in manifest.files}
    for name in inventory.below(folder):
        if _is_data(name) and name not in named:
            inventory.error(_in(folder, name), "is not in the manifest: an extra file")
    if len(inventory.findings) == faults and dcp.METADATA in named:
        dcp.add_directory(inventory, folder)
    elif len(inventory.findings) == faults:
        for name in named:
            if has_tensors(name):
                add_file(inventory, _in(folder, name))
    return True


def add_record(inventory: VerifyInventory, folder: str, record: FileRecord) -> None:
    """Add a file whose pieces have known checksums."""
    path, size = _in(folder, record.path), inventory.sizes.get(_in(folder, record.path), -1)
    names = [piece.name for piece in record.pieces]
    ends = list(accumulate(piece.size_bytes for piece in record.pieces))
    if size < 0:
        inventory.error(path, f"is missing; it has {record.size_bytes} bytes", _first(names))
        return
    if size < record.size_bytes:
        cut = next((n for n, end in zip(names, ends, strict=True) if end > size and n), "")
        missing = record.size_bytes - size
        inventory.error(path, f"the file ends too early: {missing} bytes are missing", cut)
    elif size > record.size_bytes:
        more = size - record.size_bytes
        inventory.error(path, f"{more} bytes follow the {record.size_bytes} that belong to it")
    starts = [0, *ends[:-1]]
    pieces = zip(starts, ends, record.pieces, strict=True)
    inventory.file(path).layers.append(
        [CheckedRange(a, b, one.name, xxh3_64=one.xxh3_64) for a, b, one in pieces if b <= size]
    )


def _first(names: Iterable[str]) -> str:
    return next(filter(None, names), "")


def _check_folder(
    inventory: VerifyInventory,
    folder: str,
    names: dict[str, int],
    *,
    headers_only: bool,
) -> None:
    """Check what the files of a directory say about one another."""
    indexes = [name for name in names if name.endswith(_INDEX)]
    for name in indexes:
        _check_index(inventory, folder, name)
    if not indexes:
        _check_shards(inventory, folder, names)
    _check_ranks(inventory, folder, names)
    for name, form in _POINTERS.items():
        if name in names:
            _check_pointer(inventory, _in(folder, name), form)
    weights = any(n.endswith((".safetensors", ".bin")) for n in names)
    if weights and "config.json" in names and not headers_only:
        again = VerifyInventory(location=inventory.location)  # damage is reported below
        config = again.json(_in(folder, "config.json"))
        text = isinstance(config, dict) and "vocab_size" in config
        if text and not any(one in names for one in _TOKENIZERS):
            inventory.warn(folder or ".", "has no tokenizer; copy that of the model to it")
    elif indexes or ("model.safetensors" in names and "random_states_0.pkl" not in names):
        inventory.warn(folder or ".", "has no config.json: transformers cannot load it")
    if "config.json" in names and weights:
        inventory.found("Hugging Face")
    if any(map(_is_data, names)) and not headers_only:
        for name in names:
            if name.endswith(".json") and not name.endswith((_INDEX, SIDECAR)):
                inventory.json(_in(folder, name))
    if dcp.METADATA in names and "metadata.json" in names and "common.pt" not in names:
        inventory.found("Megatron")
        inventory.error(_in(folder, "common.pt"), "is missing; Megatron cannot load without it")


def _check_index(inventory: VerifyInventory, folder: str, name: str) -> None:
    """Compare the index of shards with the tensors that these have."""
    path = _in(folder, name)
    index = inventory.json(path)
    if index is None:
        return
    mapped = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(mapped, dict) or not all(isinstance(one, str) for one in mapped.values()):
        inventory.error(path, "has no weight_map of names to files")
        return
    inventory.file(path)
    inventory.unproved[path] = "JSON without a checksum"
    held: dict[str, dict[str, int]] = defaultdict(dict)
    for tensor in inventory.tensors:
        for part in tensor.parts:
            held[part.file][tensor.name] = part.stop - part.start
    damaged = {one.path for one in inventory.findings}
    wanted: dict[str, list[str]] = defaultdict(list)
    for tensor_name, shard in mapped.items():
        wanted[_in(folder, shard)].append(tensor_name)
    for shard, tensor_names in sorted(wanted.items()):
        if inventory.sizes.get(shard, -1) < 0:
            what = f"is missing; {name} places {len(tensor_names)} tensors in it"
            inventory.error(shard, what, tensor_names[0])
        elif shard not in damaged and shard in held:  # of a pickle that is not read, no names
            for one in sorted({*tensor_names} - held[shard].keys()):
                inventory.error(shard, f"lacks a tensor that {name} places in it", one)
            for one in sorted(held[shard].keys() - {*tensor_names}):
                what = "twice" if one in mapped else f"not in {name}"
                inventory.error(shard, f"holds a tensor that is {what}", one)
    for other in inventory.below(folder):
        shard_of = _SHARD.fullmatch(other)
        of_index = shard_of and f"{shard_of[1]}.{shard_of[4]}{_INDEX}" == name
        if of_index and _in(folder, other) not in wanted:
            inventory.error(_in(folder, other), f"is not in {name}: an extra shard")


def _check_shards(inventory: VerifyInventory, folder: str, names: Iterable[str]) -> None:
    """Without an index, the numbers in the names of shards say which are missing."""
    found: dict[tuple[str, str, str], set[int]] = defaultdict(set)
    for name in names:
        if shard := _SHARD.fullmatch(name):
            found[shard[1], shard[3], shard[4]].add(int(shard[2]))
    for (stem, count, suffix), numbers in found.items():
        for number in sorted({*range(1, int(count) + 1)} - numbers):
            missing = f"{stem}-{number:05}-of-{count}.{suffix}"
            inventory.error(_in(folder, missing), "is missing among its shards")
        inventory.warn(folder or ".", f"has shards {stem}-*, but no {stem}.{suffix}{_INDEX}")


def _check_ranks(inventory: VerifyInventory, folder: str, names: Iterable[str]) -> None:
    """Ranks of DeepSpeed are numbered from 0; each has a file for every model part."""
    found: dict[tuple[str, str], set[tuple[int, int]]] = defaultdict(set)
    for name in names:
        if match := _DEEPSPEED.fullmatch(name):
            found[match[1] or "", match[4]].add((int(match[2] or 0), int(match[3])))
    if not found:
        return
    inventory.found("DeepSpeed")
    parts = range(max(part for held in found.values() for _, part in held) + 1)
    if all(kind != "model" for _, kind in found):
        found["", "model"] = set()
    for (start, kind), held in found.items():
        ranks = range(max((rank for rank, _ in held), default=0) + 1)
        for rank, part in sorted({*product(ranks, parts)} - held):
            whose = f"{start}{rank}_" if start else ""
            path = _in(folder, f"{whose}mp_rank_{part:02}_{kind}_states.pt")
            inventory.error(path, f"is missing among the {kind} states")


def _check_pointer(inventory: VerifyInventory, path: str, form: str) -> None:
    """The file that names the newest checkpoint names one that exists."""
    try:
        text = inventory.location.read(path).decode().strip("\0 \n")
    except (UnicodeDecodeError, TransferError) as error:
        inventory.error(path, f"cannot be read ({error})")
        return
    folder = _in(posixpath.dirname(path), form.format(text))
    if not text or "/" in text:
        inventory.error(path, f"names no checkpoint: {text!r}")
    elif text != "release" and not any(one.startswith(f"{folder}/") for one in inventory.sizes):
        inventory.error(path, f"names {text!r}, but there is no {posixpath.basename(folder)}")
