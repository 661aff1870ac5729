"""Object stores: checkpoints that are read in place from ``s3://`` and ``hf://``, in ranges, without a local copy.

Nothing here is imported unless a URL is named: ``paths.as_path`` does it. ``contract`` is what a store does, one module
for each store does it, ``reading`` decides which ranges to ask for and when, and ``path`` makes a place in a store a
Path. No other module asks where a path leads.
"""
