"""How results look in a terminal, and in the HTML report of ``inspect``."""
