"""``inspect``: what a checkpoint or a ``.ckpt8`` is made of. Facts are plain JSON trees; ``render`` shows them."""
