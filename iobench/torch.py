"""torch.save and torch.load over a writer: drop-ins with the stock signatures and files.

    import iobench.torch

    iobench.torch.save(state, "step-100/model.pt", writer="writer.toml")
    state = iobench.torch.load("step-100/model.pt", map_location="cpu")

Without `writer` the process's default is used, see `iobench.set_default_writer`.
"""

from iobench.integrations.torch_functions import load, save

__all__ = ["load", "save"]
