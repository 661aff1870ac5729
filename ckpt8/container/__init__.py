"""The ``.ckpt8`` file: a safetensors file of entropy-coded planes with a manifest and a seal. See FORMAT.md."""
