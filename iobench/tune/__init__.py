"""Tuning: space -> race -> refine -> confirm -> writer.toml.

Every decision is a pure function of the measurements: `Tuner` asks a `measure` function for each of
them, and what it asks next depends on their values and recorded durations only. So a journal that
is read back leads to the same place, which is how an interrupted tuning is resumed and how the
tests replay recorded and synthetic samples. Why it is built so: docs/autotune.md.
"""
