"""A source opened and understood: ``readers`` parse it, ``meaning`` explains its content, ``sources`` read its bytes.

Imports container, codecs, optim and core. Within the package meaning imports readers, and sources import both.
"""
