"""``verify --resume-steps``: how far the next steps of the optimizer drift apart after compression."""
