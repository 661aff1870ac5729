"""From a checkpoint, or objects in memory, to a container: policy, plan, encoding, measuring, writing.

Imports core, codecs, container, optim, nn and checkpoint only. Never imports ``restoring``.
"""
