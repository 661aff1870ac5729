"""``inspect --readiness``: predicts the losses of a checkpoint in formats of fewer bits."""
