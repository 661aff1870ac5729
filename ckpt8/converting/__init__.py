"""Conversion between the layouts of checkpoints: a source becomes one tree over one address space, a writer writes it.

``sources`` has what can be read beyond single files, ``writers`` what can be written; both are tables of modules.
"""
