"""One file per backend, which defines ``BACKEND``; found by its file name, see `selection`."""
