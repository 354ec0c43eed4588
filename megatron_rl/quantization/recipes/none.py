"""No quantisation: rollouts use the parameters themselves."""

RECIPE = None
