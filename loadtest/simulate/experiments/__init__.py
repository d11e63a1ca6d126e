"""Experiments with the simulator whose results stand in docs/results: `python -m loadtest.simulate.experiments`."""
