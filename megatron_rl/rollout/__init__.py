"""From tasks to graded groups."""
