"""A model over several processes: tensor-parallel ranks within pipeline stages, one worker to the scheduler."""
