"""A pair of models as the engines that people serve with want it: checkpoints, settings, a command."""
