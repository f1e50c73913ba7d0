"""The version of iobench."""

__version__ = "0.1.0"
"""The version of iobench, by Semantic Versioning."""
