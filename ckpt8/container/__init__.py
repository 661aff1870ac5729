"""The ``.ckpt8`` file: a safetensors file of entropy-coded planes with a manifest and a seal; see FORMAT.md.

Imports core and codecs only.
"""
