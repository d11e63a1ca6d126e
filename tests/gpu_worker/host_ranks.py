"""A rank's process as on a GPU, where there is none: `python -m gpu_worker --device cuda` with the host as its device.

What runs is the CUDA worker's own code, from options to graphs; of it all only the device, the attention kernels and
what carries tensors (gloo, since the device is a CPU) are others.
"""

import sys
from unittest.mock import patch

from gpu_worker.threads import set_up_threads

set_up_threads()

from gpu_worker.__main__ import main  # noqa: E402  # Torch comes in with it.
from gpu_worker.attention.paged import TorchPagedAttention  # noqa: E402
from gpu_worker.cuda.device import HostDevice  # noqa: E402
from gpu_worker.parallel import device_build  # noqa: E402

MEMORY_BYTES = 2 << 30

if __name__ == "__main__":
    with (
        patch.object(device_build, "open_cuda", lambda config: HostDevice(MEMORY_BYTES)),
        patch.object(device_build, "choose_backend", lambda *args, **options: TorchPagedAttention()),
    ):
        sys.exit(main())
