"""The command ``ckpt8``: parses arguments, calls the library, prints results. Imports every other package."""
