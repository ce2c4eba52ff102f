"""Built-in hooks, by what they are for."""
