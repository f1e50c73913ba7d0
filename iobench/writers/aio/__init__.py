"""Parts of the `aiofiles` writer: tasks and streams on asyncio."""
