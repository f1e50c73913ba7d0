"""Two ranks save one checkpoint with DCP, and read it again."""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
data = torch.arange(4096.0).view(64, 64)
state = {"w": distribute_tensor(data, mesh, [Shard(0)]), "step": 7}
dcp.save(state, checkpoint_id="dcp")
dcp.async_save(state, checkpoint_id="dcp-async").result()
again = {"w": distribute_tensor(torch.zeros(64, 64), mesh, [Shard(0)]), "step": 0}
dcp.load(again, checkpoint_id="dcp")
assert torch.equal(again["w"].full_tensor(), data)
dist.destroy_process_group()
# The mesh keeps its group, so gloo's threads outlive that, and may let tensors go after the
# interpreter: "terminate called without an active exception" (pytorch/pytorch#179291, #190489).
os._exit(0)
