"""Record a target once, then know every draft's acceptance from one pass."""
