"""Built-in hooks that notify people and services."""
