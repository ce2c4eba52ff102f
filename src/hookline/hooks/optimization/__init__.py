"""Built-in hooks that average weights or stop training."""
