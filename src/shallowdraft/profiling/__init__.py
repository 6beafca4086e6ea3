"""How long things take on this machine: iterations of given drafts, passes of any shape, and a law that fits them."""
