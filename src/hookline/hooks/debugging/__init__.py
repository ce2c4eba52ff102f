"""Built-in hooks that find errors in training."""
