"""Tensors: walking, copying, measuring, naming, and sharded values."""
