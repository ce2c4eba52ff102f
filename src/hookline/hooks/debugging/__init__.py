"""Built-in hooks that find out what goes wrong."""
