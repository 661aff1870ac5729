"""Shows results in a terminal, and in the HTML report of ``inspect``."""
