"""Which device of common.cost a GPU is."""

from common.cost.devices import DEVICES

FALLBACK = "a100-80"
"""Slower than most GPUs of later years: predictions then begin on the safe side."""


def kind_of(device_name: str) -> str:
    """Return the key in DEVICES of a device by the name that CUDA has for it; FALLBACK for one that is not there.

    Predictions only start from it: what the worker measures corrects them.
    """
    name = device_name.lower()
    return next((kind for kind in DEVICES if kind.split("-")[0] in name), FALLBACK)
