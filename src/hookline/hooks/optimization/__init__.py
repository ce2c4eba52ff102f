"""Built-in hooks that steer training."""
