"""A run's records on disk: one module per kind, with its dataclasses, writer and reader. Nothing here needs torch."""
