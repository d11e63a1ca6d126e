"""What a worker says of itself and its model. Travels up the ring, so that nothing is configured twice."""

from common.cost.shapes import ModelShape
from common.messages.base import Message, Row


class ProfilePoint(Row, frozen=True):
    """One iteration measured by a worker when it started."""

    num_tokens: int  # computed in the iteration; what is no decode is one chunk without context
    iteration_ns: int  # median of a few runs
    num_decodes: int = 0
    decode_context: int = 0  # tokens that each decode looked back on


class ModelCard(Message, frozen=True, kw_only=True):
    """The model, the same for every worker of a pool."""

    name: str  # the name that API clients use
    max_model_len: int  # tokens of prompt and output together
    vocab_size: int
    eos_token_ids: tuple[int, ...]  # any of them ends a request, unless it says ignore_eos
    # What workers can do beyond drawing a token. A worker that does not say so is of an older version, or simulated.
    has_penalties: bool = False  # Sampling's penalties and logit_bias
    has_logprobs: bool = False


class WorkerCard(Message, frozen=True, kw_only=True):
    """One worker: its model and what it can hold. Part of its HELLO."""

    model: ModelCard
    shape: ModelShape
    device: str  # "cpu AMD EPYC 7B13, avx2, 4 threads", "cuda:0 NVIDIA H200"
    device_kind: str  # key of common.cost.devices.DEVICES: where predictions start from
    tensor_parallel: int = 1
    pipeline_parallel: int = 1  # stages; as many plans can be computed at a time
    dtype: str  # of weights and KV: "float32", "bfloat16"
    attention: str  # name of the attention back end
    is_batch_invariant: bool  # whether logits depend on neither neighbours nor chunking, to the bit
    block_size: int  # tokens per KV block
    num_blocks: int  # KV blocks that plans may use, numbered from 0
    max_num_slots: int  # requests that may be resident at a time
    max_chunk_tokens: int  # tokens that one iteration may compute, decodes included; at least one for each slot
    profile: tuple[ProfilePoint, ...] = ()  # by num_tokens, ascending


class PoolCard(Message, frozen=True, kw_only=True):
    """A pool as its clients see it. The scheduler sends it to every tokenizer when it changes, each tokenizer to
    every gateway. With no worker left, num_workers is 0 and the model stays the last one known."""

    model: ModelCard
    num_workers: int
    kv_capacity: int  # tokens that the largest worker holds: no request may need more
    tbt_target_ms: float
