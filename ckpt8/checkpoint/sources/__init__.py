"""Where bytes come from: files, directories, containers, objects in memory, and parts put together of several.

Imports meaning, readers, container, codecs and core.
"""
