"""The options of the writers as keywords, for type checkers: a misspelt one is an error there.

`ODirectWriter(thread=2)` raises OptionError; with these types mypy and editors say so before.
Sizes may be text: "16MiB". tests/unit/writers/test_typed.py compares them with the options.
"""

from __future__ import annotations

from typing import TypedDict

__all__ = [
    *("AiofilesValues", "CachedValues", "DirectValues", "HybridValues", "NullValues"),
    *("S3Values", "UncachedValues", "UringValues"),
]


class NullValues(TypedDict, total=False):
    block_size: int | str
    threads: int


class DirectValues(NullValues, total=False):
    fallocate: bool


class CachedValues(DirectValues, total=False):
    pass


class UncachedValues(CachedValues, total=False):
    method: str


class AiofilesValues(TypedDict, total=False):
    block_size: int | str
    iodepth: int
    files: int
    fallocate: bool


class UringValues(TypedDict, total=False):
    iodepth: int
    block_size: int | str
    rings: int
    direct: bool
    fallocate: bool


class HybridValues(TypedDict, total=False):
    block_size: int | str
    iodepth: int
    uring: bool
    small_size: int | str
    paths: str
    read_soon: bool
    fallocate: bool


class S3Values(TypedDict, total=False):
    part_size: int | str
    threads: int
    checksum: str
    endpoint_url: str
    addressing_style: str
    verify_tls: bool
    max_pool: int
    max_attempts: int
    connect_timeout_s: float
    read_timeout_s: float
