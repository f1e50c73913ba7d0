"""Read by mypy alone, in `make check`: it refuses what is marked, and an unneeded mark."""

from iobench import writers

writers.ODirectWriter(block_size="8MiB", threads=2)
writers.BufferedWriter()
writers.GdsWriter(threads=1)
writers.S3Writer(part_size="16MiB", verify_tls=False)

writers.AiofilesWriter(thread=2)  # type: ignore[call-arg]  # misspelt
writers.BufferedWriter(thread=2)  # type: ignore[call-arg]  # misspelt
writers.GdsWriter(thread=2)  # type: ignore[call-arg]  # misspelt
writers.HybridWriter(thread=2)  # type: ignore[call-arg]  # misspelt
writers.NullWriter(thread=2)  # type: ignore[call-arg]  # misspelt
writers.ODirectWriter(thread=2)  # type: ignore[call-arg]  # misspelt
writers.S3Writer(thread=2)  # type: ignore[call-arg]  # misspelt
writers.UncachedWriter(thread=2)  # type: ignore[call-arg]  # misspelt
writers.UringWriter(thread=2)  # type: ignore[call-arg]  # misspelt
