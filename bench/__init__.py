"""Measure the cost of Hookline beside its peers: `python -m bench`, or `make bench`."""
