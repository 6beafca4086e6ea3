"""Plain and speculative decoding: propose, verify, commit."""
