"""``diff``: finds the differences between two checkpoints, and measures them."""
