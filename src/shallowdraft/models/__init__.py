"""Decoders, KV caches, reading and writing of checkpoints, tokenizers, and the comparison of vocabularies."""
