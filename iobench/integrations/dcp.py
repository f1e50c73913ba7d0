"""torch.distributed.checkpoint (DCP) through a writer; the files are those of the stock classes.

    import torch.distributed.checkpoint as dcp
    from iobench.integrations.dcp import StorageReader, StorageWriter

    dcp.save(state, storage_writer=StorageWriter("/mnt/nvme/step-100", "writer.toml"))
    dcp.load(state, storage_reader=StorageReader("/mnt/nvme/step-100", "writer.toml"))

Stock `FileSystemReader` reads what StorageWriter wrote, and StorageReader reads what stock
`FileSystemWriter` wrote. With the writer `s3` a path is `s3://bucket/prefix`.
"""

from iobench.integrations.dcp_reader import StorageReader
from iobench.integrations.dcp_writer import StorageWriter
from iobench.integrations.slice_planner import SlicePlanner

__all__ = ["SlicePlanner", "StorageReader", "StorageWriter"]
