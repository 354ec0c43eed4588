"""One file is one family; ``FAMILIES`` of `families.family` finds it by its name."""
