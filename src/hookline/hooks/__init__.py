"""Built-in hooks, grouped by purpose."""
