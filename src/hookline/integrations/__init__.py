"""Hosts: loops that are not Hookline's, and how hooks get into them."""
