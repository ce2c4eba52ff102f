"""Integrations: Hookline attached to loops that are not its own."""
