"""``diff``: what two checkpoints have in common, and how far apart they are in all else."""
