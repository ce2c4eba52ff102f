"""Built-in hooks that measure and log training."""
