"""Tuning: space -> race -> refine -> confirm -> writer.toml.

Every decision is a pure function of the measurements. `Tuner` calls a `measure` function for each
trial, and the next trial depends only on the values and recorded durations of the earlier ones. So
a replayed journal leads to the same decisions. An interrupted tuning is resumed this way, and the
tests replay recorded and synthetic samples this way. docs/autotune.md explains the design.
"""
