"""The worker: executes plans on a model. Weights, KV cache and sampler state, all of it rebuildable; no policy.

The only package that may import torch.
"""
