"""The simulator: the scheduler's own core under a virtual clock, models of devices standing in for workers.

`requests` says what arrives, `truth` and `tables` how long a plan takes, `device` runs plans one after another,
`measures` keeps what came of it, `simulation` is the loop, `setup` builds all of it from options.
"""
