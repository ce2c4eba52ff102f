"""`python -m hookline`: the same command line as `hookline`."""

from __future__ import annotations

from hookline.cli.app import main

if __name__ == "__main__":
    main()
