"""One folder or module per environment; the file's presence is its registration."""
