"""What a page carries to draw its charts: the Vega runtime, and JSON that ends no element."""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from typing import Any

import altair as alt
import vl_convert

__all__ = ["content_hash", "inline_json", "inline_script", "runtime", "vega_lite_version"]

_SNIPPET = "window.vegaEmbed = vegaEmbed;"


def vega_lite_version() -> str:
    """Return the version of Vega-Lite whose specs altair makes, as vl-convert takes it: `6.1`."""
    return ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])


@cache
def runtime() -> str:
    """Return Vega, Vega-Lite and vega-embed as one script for `inline_script`."""
    return inline_script(vl_convert.javascript_bundle(_SNIPPET, vl_version=vega_lite_version()))


def inline_script(source: str) -> str:
    """Return `source` so that no text in it ends, or hides the end of, its script element."""
    return source.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def inline_json(value: Any) -> str:
    """Return `value` as JSON that is safe in a script element; infinite numbers become null."""
    text = json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def content_hash(script: str) -> str:
    """Return the source by which a content security policy allows exactly this script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    if isinstance(value, float) and value - value != 0:  # infinite, or not a number
        return None
    return value
