"""Triton kernels. Each has a plain counterpart in PyTorch; triton is imported where one is first used."""
