"""One file per advantage: a class ``Advantage``, see ``extension.Extension``.

Advantages are made after scoring. Those of an outcome read the rewards of the whole step, ``batch.step``, and are the
same at all tokens of a sample, whatever the number of its sequences.
"""
