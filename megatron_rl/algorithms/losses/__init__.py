"""One file per policy loss; the contract is ``interfaces.LossFunction``."""
