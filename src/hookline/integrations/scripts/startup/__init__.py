"""The folder that `hookline run` puts on PYTHONPATH: Python runs its `sitecustomize` at start."""
