"""Drop-in replacements of torch.save and torch.load that use a writer; stock signatures and files.

    import iobench.torch

    iobench.torch.save(state, "step-100/model.pt", writer="writer.toml")
    state = iobench.torch.load("step-100/model.pt", map_location="cpu")

Calls without `writer` use the default of the process: `iobench.set_default_writer`.
"""

from iobench.integrations.torch_dropins import load, save

__all__ = ["load", "save"]
