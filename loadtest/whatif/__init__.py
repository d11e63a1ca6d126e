"""`legato whatif`: a recording of a scheduler, simulated under other settings."""
