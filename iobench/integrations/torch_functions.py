"""The drop-ins of `iobench.torch`: stock signatures and files, over a writer."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch.serialization import DEFAULT_PROTOCOL

from iobench.integrations import plain_torch
from iobench.integrations.bypass import bypass
from iobench.integrations.default_writer import WriterLike, chosen_writer
from iobench.integrations.stock_path import (
    NotOurs,
    NotPicklable,
    check_stock_can_load,
    check_stock_can_save,
    tell,
)

__all__ = ["load", "save"]


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
    """`torch.save`, through `writer`: the same file, byte for byte, durable on return.

    It appears whole: until then, and when this fails, the file that was there stays. What a
    writer cannot do just as stock torch does it (file objects, other pickle modules and formats,
    files with hard links or permissions of their own, devices and pipes) stock torch does; of
    paths the logger `iobench` tells so. Of an object in a bucket, which stock torch does not know,
    that raises UsageError. Raises SaveError, which is a RuntimeError and an OSError,
    UnavailableError, and what pickling raises.
    """
    options = (pickle_module, pickle_protocol)
    flags = (_use_new_zipfile_serialization, _disable_byteorder_record)
    with bypass():
        try:
            write = plain_torch.prepare_save(chosen_writer(writer), obj, f, *options, *flags)
        except NotOurs as why:
            check_stock_can_save("torch.save", f, why)
            tell("torch.save", f, why)
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
    """`torch.load`, the file read by `writer`: in parallel, past the page cache where it does so.

    The object is unpickled by torch, which decides what `weights_only` admits. Whatever the writer
    cannot read as torch does (file objects, `mmap=True`, files in other formats, or damaged) goes
    to stock torch, and so do its errors; of paths the logger `iobench` tells so.

    Of an object in a bucket, which stock torch does not know, it raises FileNotFoundError where
    there is none, what else went wrong (TransferError, UnavailableError, DataMismatchError), and
    UsageError for what the writer does not do.
    """
    given: dict[str, Any] = {"weights_only": weights_only, "mmap": mmap, **pickle_load_args}
    chosen = chosen_writer(writer)
    with bypass():
        try:
            return plain_torch.load(chosen, f, map_location, pickle_module, **given)[0]
        except Exception as why:  # noqa: BLE001 -- stock torch raises its own
            check_stock_can_load("torch.load", f, why)
            state = torch.load(f, map_location, pickle_module, **given)
            tell("torch.load", f, why)
            return state
