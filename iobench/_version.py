"""The version of iobench."""

__version__ = "0.1.0"
