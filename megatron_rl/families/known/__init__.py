"""One file per family, found by its name in ``FAMILIES`` of `families.family`."""
