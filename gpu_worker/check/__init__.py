"""Parts of `legato gpu-check`: what can be said of kernels, model and speed on the device at hand.

Imports nothing that a bare GPU machine lacks: torch, triton, numpy, msgspec and structlog are enough.
"""
