"""One file per advantage: a class ``Advantage``, see ``extension.Extension``.

Advantages are computed after scoring. Outcome advantages read the rewards of the whole step, ``batch.step``, and are
equal at all tokens of a sample, in all its sequences.
"""
