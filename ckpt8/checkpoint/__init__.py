"""A source opened and understood: ``readers`` open it, ``meaning`` says what is in it, ``sources`` give its bytes.

Imports container, codecs, optim and core. Within the package meaning imports readers, and sources import both.
"""
