"""What the three programs share: the parts of a run, the loop that trains, records, and what ends a run early."""
