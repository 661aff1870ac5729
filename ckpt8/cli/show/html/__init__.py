"""The report of ``inspect --html``: one file that needs no network and no script."""
