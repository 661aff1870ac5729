"""Turns a checkpoint, or objects in memory, into a container: policy, plan, encoding, measuring, writing.

Imports core, codecs, container, optim, nn and checkpoint only. Never imports ``restoring``.
"""
