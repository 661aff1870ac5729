"""Converts a checkpoint into another format. Imports restoring, compressing and what they import.

``sources.LAYOUTS`` lists the layouts of directories that it reads, ``writers.WRITERS`` the formats that it writes.
"""
