"""Output in a terminal or a notebook: progress, tables, and text that others chose."""
