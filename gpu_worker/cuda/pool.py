"""How many KV blocks a device holds, from what the largest iteration leaves free."""

from dataclasses import dataclass

from gpu_worker.errors import UnusableModel

GRAPH_RESERVE_BYTES = 1 << 30
"""What captured graphs and their workspaces take. An estimate, for 35 sizes; gpu-check prints what it was."""
SLACK_BYTES = 300 << 20
"""What fragments, and libraries that allocate on their own, may take besides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """A device's memory after the largest iteration, which ran with a small pool."""

    total_bytes: int
    free_bytes: int  # nobody's
    held_bytes: int  # this process's, for tensors now or later
    peak_bytes: int  # most that this process's tensors took: weights, the small pool, activations

    @property
    def foreign_bytes(self) -> int:
        """Other processes', and this one's context."""
        return self.total_bytes - self.free_bytes - self.held_bytes


def num_blocks(
    facts: MemoryFacts,
    *,
    memory_share: float,
    block_bytes: int,
    block_size: int,
    max_model_len: int,
    kv_tokens: int = 0,
    reserve_bytes: int = GRAPH_RESERVE_BYTES,
) -> int:
    """Return the number of blocks of the pool that plans may use; there is memory for one more.

    Args:
        facts: What was measured.
        memory_share: Of the device, what this process may take.
        block_bytes: One block, keys and values of all layers.
        block_size: Tokens per block.
        max_model_len: The pool must hold one request of this length.
        kv_tokens: Take so many tokens and no more; 0 takes what there is.
        reserve_bytes: For CUDA graphs; 0 without.

    Raises:
        UnusableModel: If the pool would not hold a request of full length, or kv_tokens are more than fit; with the
            numbers.
    """
    allowed = int(memory_share * facts.total_bytes)
    pool_bytes = allowed - facts.foreign_bytes - facts.peak_bytes - reserve_bytes - SLACK_BYTES
    affordable = max(0, pool_bytes // block_bytes - 1)
    wanted = kv_tokens // block_size if kv_tokens else affordable
    account = (
        f"{_gib(allowed)} allowed of {_gib(facts.total_bytes)}, {_gib(facts.foreign_bytes)} not ours, "
        f"{_gib(facts.peak_bytes)} for weights and the largest iteration, {_gib(reserve_bytes + SLACK_BYTES)} reserved"
    )
    if wanted > affordable:
        raise UnusableModel(
            f"--kv-tokens {kv_tokens} needs {_gib((wanted + 1) * block_bytes)}; "
            f"{affordable * block_size} tokens fit: {account}"
        )
    if wanted * block_size < max_model_len:
        raise UnusableModel(
            f"the KV pool holds {wanted * block_size} tokens ({_gib(wanted * block_bytes)}), less than one request of "
            f"--max-model-len {max_model_len}: {account}. Lower --max-model-len or --max-chunk-tokens, or raise "
            f"--gpu-memory-share"
        )
    return wanted


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB"
