"""One file per filter of dynamic sampling: a class ``Filter``, see ``extension.GroupFilter``."""
