"""One file per mismatch correction; the contract is ``interfaces.CorrectionFunction``.

Files without ``compute`` are helpers: composition, statistics and the warning of a collapse.
"""
