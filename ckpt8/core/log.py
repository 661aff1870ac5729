"""The logger ``ckpt8``: what the library says besides its results, such as what it falls back to.

It is silent until a program gives it a handler: ``logging.basicConfig(level=logging.INFO)`` shows all of it. What a
program must know is a warning or an error instead.
"""

import logging

log = logging.getLogger("ckpt8")
log.addHandler(logging.NullHandler())
