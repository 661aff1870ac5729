"""Shows results: in a terminal, and on HTML pages that need no network and no script."""
