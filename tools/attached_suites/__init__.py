"""Other libraries' own test suites, run plain and with a session attached; see README.md."""
