"""Sources of bytes: files, directories, containers, objects in memory, and checkpoints made of several parts.

Imports meaning, readers, container, codecs and core.
"""
