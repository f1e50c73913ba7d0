"""Internals of the `aiofiles` writer: asyncio tasks and streams."""
