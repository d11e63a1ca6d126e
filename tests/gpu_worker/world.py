"""A runner and the smallest scheduler that can drive it: requests by name, blocks as the test likes."""

import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from common.ids import BlockId, RequestId, Slot, pack_ids
from common.messages.plans import NewRequest, Plan, PlanChunk
from common.messages.requests import Sampling
from common.models import find_model
from gpu_worker.attention import CPU_BACKENDS, choose_backend
from gpu_worker.attention.base import AttentionSpec
from gpu_worker.forward import make_forward
from gpu_worker.kernels.library import find_kernels
from gpu_worker.loading import LoadedModel, load_model, open_model
from gpu_worker.models.families import unlike_llama
from gpu_worker.runner import Outcome, Runner
from gpu_worker.slots import Iteration, Limits, PlanState

GREEDY = Sampling(temperature=0.0)
KERNELS = find_kernels("auto")
BACKEND_NAMES = [backend.name for backend in CPU_BACKENDS]


def load(path: Path, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """Load a model as the worker does."""
    return load_model(open_model(find_model(str(path))), dtype)


def load_named(name: str) -> LoadedModel:
    """Load a pulled model in float32."""
    return load_model(open_model(find_model(name)), torch.float32)


class World:
    """One model, one KV pool. A request's blocks are given whole when it is added, in a shuffled order."""

    def __init__(
        self, model: LoadedModel, *, backend: str = "cpu", block_size: int = 4, num_blocks: int = 256, seed: int = 0
    ) -> None:
        config = model.config
        dtype = model.weights.embedding.dtype
        self.spec = spec = AttentionSpec(
            device="cpu",
            dtype=dtype,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=block_size,
            kernels=KERNELS,
            scale=config.attention_scale,
            unlike_llama=unlike_llama(model.family, config),
        )
        self.limits = Limits(
            vocab_size=config.vocab_size,
            max_model_len=model.max_model_len,
            block_size=block_size,
            num_blocks=num_blocks,
            max_num_slots=64,
            max_chunk_tokens=8192,
        )
        forward, kv_cache = make_forward(model, choose_backend(backend, spec), spec, self.limits)
        self.runner = Runner(forward, kv_cache, model.eos_token_ids, self.limits.max_num_slots)
        self._state = PlanState(self.limits)
        self._next_iteration = 0
        self._introduced: list[NewRequest] = []
        self._slots: dict[str, Slot] = {}
        self._num_known: dict[str, int] = {}
        self._num_computed: dict[str, int] = {}
        self.free_blocks = [BlockId(block) for block in range(num_blocks)]
        random.Random(seed).shuffle(self.free_blocks)
        self.logits: dict[str, Tensor] = {}  # of the last iteration, for each request that sampled

    def add(
        self,
        name: str,
        token_ids: Sequence[int],
        *,
        sampling: Sampling = GREEDY,
        seed: int = 0,
        num_prompt_tokens: int | None = None,
        room: int = 0,
        num_scored: int = 0,
    ) -> None:
        """Introduce a request, with blocks for its tokens and room more."""
        slot = Slot(len(self._slots))
        num_blocks = -(-(len(token_ids) + room) // self.limits.block_size)
        blocks, self.free_blocks = self.free_blocks[:num_blocks], self.free_blocks[num_blocks:]
        assert len(blocks) == num_blocks, "the test's pool is too small"
        self._introduced.append(
            NewRequest(
                slot=slot,
                request_id=RequestId(name),
                token_ids=pack_ids(token_ids),
                num_prompt_tokens=len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
                seed=seed,
                sampling=sampling,
                block_table=pack_ids(blocks),
                num_scored=num_scored,
            )
        )
        self._slots[name] = slot
        self._num_known[name] = len(token_ids)
        self._num_computed[name] = 0

    def iterate(self, num_tokens: Mapping[str, int]) -> dict[str, int]:
        """Run one iteration that computes so many more tokens of each request; return what was sampled.

        A chunk that ends at the last known token is sampled.
        """
        applied = self._apply(num_tokens)
        with torch.inference_mode():
            logits = self.runner.logits(applied.rows)
            outcome = Outcome()
            self.runner.draw(applied.rows, logits.clone(), outcome)
        names = [name for name, row in zip(num_tokens, applied.rows, strict=True) if row.is_sampled]
        self.logits = dict(zip(names, logits.clone(), strict=True))
        return dict(zip(names, outcome.token_ids, strict=True))

    def outcome(self, num_tokens: Mapping[str, int]) -> Outcome:
        """Run one iteration as iterate does, scores and all; return what a worker would report of it."""
        return self.runner.run(self._apply(num_tokens).rows)

    def _apply(self, num_tokens: Mapping[str, int]) -> Iteration:
        chunks = []
        for name, count in num_tokens.items():
            start = self._num_computed[name]
            self._num_computed[name] = end = start + count
            is_sampled = end == self._num_known[name]
            self._num_known[name] += is_sampled
            chunks.append(PlanChunk(self._slots[name], start, count, is_sampled))
        plan = Plan(epoch=1, iteration=self._next_iteration, introduced=tuple(self._introduced), chunks=tuple(chunks))
        self._introduced.clear()
        self._next_iteration += 1
        applied = self._state.apply(plan)
        assert isinstance(applied, Iteration), applied
        return applied

    def num_left(self, name: str) -> int:
        """Return how many known tokens of a request are not computed."""
        return self._num_known[name] - self._num_computed[name]

    def prefill(self, name: str, chunk_len: int) -> int:
        """Compute a request's known tokens in chunks; return what was sampled after the last."""
        while (rest := self.num_left(name)) > chunk_len:
            assert self.iterate({name: chunk_len}) == {}
        return self.iterate({name: rest})[name]

    def generate(self, names: Iterable[str], num_tokens: int) -> dict[str, list[int]]:
        """Return the next num_tokens tokens of each request, computing all of them side by side."""
        names = list(names)
        output: dict[str, list[int]] = {name: [] for name in names}
        for _ in range(num_tokens):
            for name, token in self.iterate({name: self.num_left(name) for name in names}).items():
                output[name].append(token)
        return output


def prompt(length: int, seed: int = 0, vocab_size: int = 199) -> list[int]:
    """Return random token ids."""
    generator = random.Random(f"{length} {seed}")
    return [generator.randrange(vocab_size) for _ in range(length)]
