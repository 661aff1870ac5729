"""``diff``: what two checkpoints have in common, and how far apart the rest is."""
