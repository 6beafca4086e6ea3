"""Shapes of models: their tensors, bytes and FLOPs, without torch."""
