"""The processes of a run, and how interrupts reach them."""
