"""One thread for torch: the machine's other cores belong to other tests, and tiny models gain nothing from more.

And Triton's interpreter: read when a kernel is defined, so it is set before any test imports one. On a machine with a
GPU `legato gpu-check` runs the compiled kernels.
"""

import os

import torch

torch.set_num_threads(1)
os.environ["TRITON_INTERPRET"] = "1"
