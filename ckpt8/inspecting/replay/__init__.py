"""``verify --resume-steps``: how much compression changes the next steps of the optimizer."""
