"""Export of a pair of models to the engines that serve them: checkpoints, settings, a start command."""
