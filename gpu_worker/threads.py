"""How the model's threads wait. Imports no torch: OpenMP reads its settings once, when torch loads it."""

import os


def set_up_threads() -> None:
    """Let threads that wait for work sleep. Call before anything imports torch; what the operator has set stays.

    By default OpenMP's threads spin for work that comes soon. Beside other busy processes (the rest of the ring, on a
    small machine) the spinner holds the core that the thread it waits for would need: SmolLM2's matrix products for one
    token, on two cores beside one busy process, took 1022 ms spinning and 38 ms asleep (27 and 62 ms with no busy one).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("KMP_BLOCKTIME", "0")  # The same for Intel's and LLVM's OpenMP.


def num_usable_cores() -> int:
    """Return how many cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
