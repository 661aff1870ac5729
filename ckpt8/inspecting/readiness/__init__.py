"""``inspect --readiness``: what formats of fewer bits would make of a checkpoint."""
