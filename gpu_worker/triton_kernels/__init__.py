"""Our own GPU kernels, in Triton. kernels_*.py hold device code alone; the other modules launch it on tensors."""
