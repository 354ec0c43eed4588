"""One file per policy loss: a class ``Loss``, see ``extension.Extension``. The trainer applies denominators."""
