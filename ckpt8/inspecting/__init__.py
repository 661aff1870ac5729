"""Looks at checkpoints and containers, and changes nothing: inspect, survey, diff, verify, replay, readiness.

Imports everything but ``integrations`` and ``cli``. Results are plain JSON trees; ``cli`` shows them.
"""
