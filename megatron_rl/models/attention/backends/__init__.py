"""One file a backend, each with a ``BACKEND``; found by its file name, see `selection`."""
