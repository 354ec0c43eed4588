"""One file per mismatch correction; the contract is ``interfaces.CorrectionFunction``."""
