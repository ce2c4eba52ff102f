"""Built-in hooks that keep what training made."""
