"""`save` and `load` of `iobench.torch`: drop-in replacements of torch.save and torch.load.

They have the stock signatures plus `writer`. `torch_transfer` does the work; what it cannot do
exactly like stock torch, these functions pass on to stock torch.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch.serialization import DEFAULT_PROTOCOL

from iobench.integrations import torch_transfer
from iobench.integrations.default_writer import chosen_writer
from iobench.integrations.replacing import bypass
from iobench.integrations.stock_path import (
    NotPicklable,
    Unsupported,
    check_stock_can_load,
    check_stock_can_save,
    log_fallback,
)
from iobench.writers.config import WriterLike


def save(
    obj: object,
    f: Any,
    pickle_module: Any = pickle,
    pickle_protocol: int = DEFAULT_PROTOCOL,
    _use_new_zipfile_serialization: bool = True,
    _disable_byteorder_record: bool = False,
    *,
    writer: WriterLike | None = None,
) -> None:
    """Save like `torch.save`, using `writer`: the same file, byte for byte, durable on return.

    The new file appears complete. Until then, and when this function fails, the old file stays.

    Stock torch saves what a writer cannot save in the same way: to file objects, with other pickle
    modules and formats, over files with hard links or permissions of their own, to devices and
    pipes. For a path the logger `iobench` reports this fallback. Stock torch cannot write to
    buckets, so the same call raises UsageError there.

    Raises SaveError, which is a RuntimeError and an OSError, UnavailableError, and what pickling
    raises.
    """
    options = (pickle_module, pickle_protocol)
    flags = (_use_new_zipfile_serialization, _disable_byteorder_record)
    with bypass():
        try:
            write = torch_transfer.prepare_save(chosen_writer(writer), obj, f, *options, *flags)
        except Unsupported as why:
            check_stock_can_save("torch.save", f, why)
            log_fallback("torch.save", f, why)
            torch.save(obj, f, *options, *flags)
        except NotPicklable as why:
            raise why.error from None
        else:
            write()


def load(
    f: Any,
    map_location: Any = None,
    pickle_module: Any = None,
    *,
    weights_only: bool | None = None,
    mmap: bool | None = None,
    writer: WriterLike | None = None,
    **pickle_load_args: Any,
) -> Any:
    """Load like `torch.load`; `writer` reads the file: in parallel, and without the page cache
    if that is how it works.

    Torch unpickles the object and decides what `weights_only` admits. Stock torch loads what the
    writer cannot load in the same way (file objects, `mmap=True`, files that are damaged or of
    other formats), and raises its own errors. For a path the logger `iobench` reports this
    fallback.

    Stock torch cannot read buckets. There this function raises FileNotFoundError if the object does
    not exist, UsageError for calls that need stock torch, and otherwise the error itself
    (TransferError, UnavailableError, DataMismatchError).
    """
    given: dict[str, Any] = {"weights_only": weights_only, "mmap": mmap, **pickle_load_args}
    chosen = chosen_writer(writer)
    with bypass():
        try:
            return torch_transfer.load(chosen, f, map_location, pickle_module, **given)[0]
        except Exception as why:  # noqa: BLE001 -- stock torch loads it, or raises its own error
            check_stock_can_load("torch.load", f, why)
            state = torch.load(f, map_location, pickle_module, **given)
            log_fallback("torch.load", f, why)
            return state
