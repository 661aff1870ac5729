"""One checkpoint becomes another format. Imports restoring, compressing and what they import.

``sources.LAYOUTS`` lists the directories that it reads, ``writers.WRITERS`` the formats that it writes, a module each.
"""
