"""Drafters, which propose tokens: one file for each kind."""
