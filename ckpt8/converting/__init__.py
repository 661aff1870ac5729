"""One checkpoint becomes another format. Imports restoring, compressing and what they import.

``sources`` has what can be read beyond single files, ``writers`` what can be written; both are tables of modules.
"""
