"""iobench: the I/O-path benchmark and tuning harness for LLM checkpoints, and its writers."""

__version__ = "0.1.0"
