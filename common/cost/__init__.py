"""How long an iteration takes: shared by the scheduler, the simulator and the simulated device.

`shapes` and `devices` are figures, `load` is what an iteration computes, `roofline` turns both into the terms of its
time, `fit` corrects the terms by what a worker measured.
"""
