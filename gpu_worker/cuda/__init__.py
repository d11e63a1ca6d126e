"""The runner for CUDA devices: buffers that stay, graphs, and a host that waits once an iteration.

Everything here is written against device.Device, so that the same code runs on the CPU where there is no GPU.
"""
