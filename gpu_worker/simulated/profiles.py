"""Which GPU the simulated device stands for, and which model lies on it: `a100-mistral-7b`, `h100-llama2-70b-tp4`."""

import re
from dataclasses import dataclass

from common.cost.devices import DEVICES, Device
from common.cost.load import Load
from common.cost.roofline import Roofline
from common.cost.shapes import SHAPES, ModelShape
from common.messages.cards import ProfilePoint

SHORT_NAMES = {"a100": "a100-80"}
"""Names of devices that people say."""
MEMORY_SHARE = 0.9
"""Of a device's memory, what weights and KV cache take together; activations and the runtime have the rest."""
POINT_DECODES = 8
POINT_CONTEXT = 256
"""The points of the profile are made as a real worker's: some decodes at a moderate context, beside one chunk."""

_TENSOR_PARALLEL = re.compile(r"(?P<rest>.+)-tp(?P<ways>[1-9][0-9]*)")


class UnknownProfile(ValueError):
    """No such device or model, or the one does not fit on the other; the message says what there is."""


@dataclass(frozen=True, slots=True)
class Profile:
    """A device, or a tensor-parallel group of them, and the model that it holds."""

    name: str
    device_kind: str  # key of DEVICES
    device: Device
    shape: ModelShape
    tensor_parallel: int

    @property
    def roofline(self) -> Roofline:
        return Roofline(self.shape, self.device, self.tensor_parallel)

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV fits beside the weights; none if the weights alone do not fit."""
        shape = self.shape
        # The embedding is looked up and not multiplied, so num_weights leaves it out, but it takes memory all the same.
        num_weights = shape.num_weights + shape.hidden_size * shape.vocab_size
        free_bytes = (
            MEMORY_SHARE * self.tensor_parallel * self.device.memory_bytes - num_weights * shape.bytes_per_weight
        )
        return max(0, int(free_bytes // shape.kv_bytes_per_token))


def profile_named(name: str) -> Profile:
    """Return the profile DEVICE-MODEL, with `-tpN` for N devices.

    Raises:
        UnknownProfile: If there is none, or its weights leave no room for a KV cache.
    """
    match = _TENSOR_PARALLEL.fullmatch(name)
    pair, ways = (match["rest"], int(match["ways"])) if match else (name, 1)
    profile = _pair_named(name, pair, ways)
    if profile is None:
        raise UnknownProfile(f"--profile is {name!r}; known: {', '.join(known_profiles())}, each also with -tpN")
    if profile.kv_tokens == 0:
        raise UnknownProfile(
            f"--profile {name}: {ways} x {profile.device.memory_bytes / 1e9:.0f} GB leave no room for KV beside the "
            f"weights; try {pair}-tp{2 * ways}"
        )
    return profile


def known_profiles() -> list[str]:
    """Names of every pair whose weights fit on one device."""
    pairs = [f"{device}-{model}" for device in _devices() for model in SHAPES]
    return [pair for pair in pairs if (profile := _pair_named(pair, pair, 1)) is not None and profile.kv_tokens]


def points_of(profile: Profile, max_chunk_tokens: int) -> tuple[ProfilePoint, ...]:
    """The profile that a worker on this device would measure at its start."""
    roofline = profile.roofline
    points = []
    for num_tokens in _sizes(max_chunk_tokens):
        num_decodes = min(POINT_DECODES, num_tokens)
        load = Load()
        load.add_decodes(num_decodes, num_decodes * POINT_CONTEXT)
        if num_tokens > num_decodes:
            load.add_chunk(0, num_tokens - num_decodes, is_sampled=True)
        points.append(ProfilePoint(num_tokens, round(roofline.time_ns(load)), num_decodes, POINT_CONTEXT))
    return tuple(points)


def _devices() -> dict[str, str]:
    """Keys of DEVICES by the names that a profile may begin with; a short name hides its long one."""
    long_names = {key: key for key in DEVICES if key not in SHORT_NAMES.values()}
    return {**SHORT_NAMES, **long_names}


def _pair_named(name: str, pair: str, ways: int) -> Profile | None:
    for device, key in (*_devices().items(), *((key, key) for key in DEVICES)):
        model = pair.removeprefix(f"{device}-")
        if model != pair and model in SHAPES:
            return Profile(name, key, DEVICES[key], SHAPES[model], ways)
    return None


def _sizes(most: int) -> list[int]:
    """1, 8, then doubling, up to most."""
    sizes = [1]
    size = 8
    while size < most:
        sizes.append(size)
        size *= 2
    return [*sizes, most] if most > 1 else sizes
