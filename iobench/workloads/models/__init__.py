"""Models: tensor templates (`families`), and architectures with their sources (`*.yaml`)."""
