"""The memory of a run: its estimate, and what is on the device in rollouts, updates, evaluations and saves."""
