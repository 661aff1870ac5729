"""From a container back to files, to objects, and into a live model and optimizer (``resume``).

Imports core, codecs, container, optim, nn and checkpoint only. Never imports ``compressing``.
"""
