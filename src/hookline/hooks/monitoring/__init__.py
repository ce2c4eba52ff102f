"""Built-in hooks that see how training goes."""
