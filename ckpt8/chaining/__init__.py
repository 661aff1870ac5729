"""Works on many checkpoints: several sources, the chain of a run, the removal of what was verified.

Imports everything but ``integrations`` and ``cli``.
"""
