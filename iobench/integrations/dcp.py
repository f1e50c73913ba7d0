"""torch.distributed.checkpoint (DCP) through our writers; files as the stock classes have them.

    import torch.distributed.checkpoint as dcp
    from iobench.integrations.dcp import StorageReader, StorageWriter

    dcp.save(state, storage_writer=StorageWriter("/mnt/nvme/step-100", "writer.toml"))
    dcp.load(state, storage_reader=StorageReader("/mnt/nvme/step-100", "writer.toml"))

Stock `FileSystemReader` reads what StorageWriter wrote, and StorageReader what stock
`FileSystemWriter` wrote. A path may be `s3://bucket/prefix` with the writer `s3`.
"""

from iobench.integrations.dcp_reader import StorageReader
from iobench.integrations.dcp_writer import StorageWriter

__all__ = ["StorageReader", "StorageWriter"]
