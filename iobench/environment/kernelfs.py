"""Reading small files of /proc and /sys, where any of them may be missing, empty or refused."""

from __future__ import annotations

from pathlib import Path


def read_text(path: Path | str) -> str | None:
    """The stripped text of a small kernel file; None when it is missing, empty or refused."""
    try:
        text = Path(path).read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:  # sysfs answers EINVAL, EIO, ENODEV ... for attributes a driver lacks
        return None
    return text.strip("\0 \t\n") or None


def read_int(path: Path | str) -> int | None:
    """The whole number in a small kernel file; None when there is none."""
    text = read_text(path)
    try:
        return int(text) if text is not None else None
    except ValueError:
        return None


def selected(text: str | None) -> str | None:
    """The chosen word of a kernel list: `mq-deadline` of `none [mq-deadline] kyber`."""
    if text is None:
        return None
    start, end = text.find("["), text.find("]")
    return text[start + 1 : end] if 0 <= start < end else text
