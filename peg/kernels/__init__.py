"""Functions of tensors: a plain PyTorch reference each, a Triton kernel where one exists. Knows nothing of peg."""
