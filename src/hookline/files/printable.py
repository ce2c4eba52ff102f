"""The functions of `hookline.printable`, beside those that open files from elsewhere."""

from hookline.printable import escape_controls, printable

__all__ = ["escape_controls", "printable"]
