"""``ckpt8.runs``: the checkpoints of a run, from the heads of its files."""
