"""What presets of former versions chose: their files are read for ever."""

from __future__ import annotations

from ckpt8.codecs.companded8 import Companded8
from ckpt8.codecs.split24 import Split24

COMPACT = (Split24(R=7), Companded8(Q=31), Companded8(signed=False, Q=63, p=0.5))
