"""``python -m ckpt8``."""

from ckpt8.cli import main

main()
