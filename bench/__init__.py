"""What hookline costs, measured beside its peers: `python -m bench`, or `make bench`."""
