"""Decoders, caches, checkpoints in and out, tokenizers and the vocabulary check."""
