"""The charts of a report: one file each, from summaries and samples to a Vega-Lite spec."""
