"""One file per advantage; the contract is ``interfaces.AdvantageFunction``."""
