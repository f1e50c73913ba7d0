"""The data of a chart, for tests of what is drawn."""

from typing import Any

from iobench.report.document import Chart


def values(chart: Chart, mark: str) -> list[dict[str, Any]]:
    """Return the rows that the layers of a kind of mark, such as `point`, draw."""
    rows = []
    for layer in chart.spec["layer"]:
        if layer["mark"]["type"] == mark:
            data = layer.get("data") or chart.spec["data"]  # hoisted if all have the same
            rows += data.get("values") or chart.spec["datasets"][data["name"]]
    return rows
