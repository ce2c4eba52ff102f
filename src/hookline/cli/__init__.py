"""The command line: `hookline --help`."""
