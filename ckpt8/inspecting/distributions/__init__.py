"""How values and codes are distributed: the histograms, code usage and errors of ``inspect --html``."""
