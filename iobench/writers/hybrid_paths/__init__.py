"""Parts of the `hybrid` writer: the path of each operation, and one file with several paths."""
