"""Built-in hooks that save and copy checkpoints."""
