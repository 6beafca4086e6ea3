"""Studies, from checkpoints to an answer: record, replay, profile, predict, then verify live."""
