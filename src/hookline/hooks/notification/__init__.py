"""Built-in hooks that tell others."""
