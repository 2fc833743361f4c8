"""Several processes, one run: who they are and what they exchange, by PyTorch's distributed stack."""
