"""Make draft models: text to tokens, training, pruning to an exact shape, distillation."""
