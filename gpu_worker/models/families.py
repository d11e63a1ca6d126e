"""The families of models that can be served, by the name that config.json has for them."""

from gpu_worker.errors import UnusableModel
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.decoder import Family
from gpu_worker.models.gemma3 import Gemma3
from gpu_worker.models.llama import Llama
from gpu_worker.models.mistral import Mistral
from gpu_worker.models.phi3 import Phi3
from gpu_worker.models.qwen2 import Qwen2
from gpu_worker.models.qwen3 import Qwen3

_ALL: tuple[Family, ...] = (Llama(), Mistral(), Qwen2(), Qwen3(), Gemma3(), Phi3())
FAMILIES = {family.architecture: family for family in _ALL}


def family_named(architecture: str) -> Family:
    """Return the family of that name.

    Raises:
        UnusableModel: If there is none, with the list of those that are.
    """
    check_architecture(architecture, tuple(FAMILIES))
    return FAMILIES[architecture]


def check_architecture(name: str, known: tuple[str, ...]) -> None:
    """Refuse an architecture that is not known.

    Raises:
        UnusableModel: With the list of those that are.
    """
    if name not in known:
        raise UnusableModel(f"architecture {name!r} is not supported; known: {', '.join(known)}")


def unlike_llama(family: Family, config: ModelConfig) -> str:
    """Return what a model does that kernels made for Llama have no operation for; empty if nothing."""
    if family.unlike_llama:
        return family.unlike_llama
    if config.rope.rotated_share != 1:
        return "heads that are rotated in part"
    return ""
