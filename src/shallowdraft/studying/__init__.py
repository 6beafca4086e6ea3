"""From checkpoints to a defensible answer: record, replay, profile, predict, then verify live."""
