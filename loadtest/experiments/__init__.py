"""Measurements whose results stand in docs/results, each one command: `python -m loadtest.experiments.NAME`."""
