"""Our own kernels against plain torch, for each instruction set of this machine, and their invariance to the bit."""

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from gpu_worker.attention.base import BatchLayout
from gpu_worker.attention.reference import ReferenceAttention, ReferenceBatch
from gpu_worker.kernels.build import InstructionSet, KernelsUnavailable, build, usable_instruction_sets
from gpu_worker.kernels.library import Engine, Epilogue, Kernels, WeightType, find_kernels
from gpu_worker.kernels.program import FlatRows, HeadShape, Program
from gpu_worker.kv_cache import KvCache
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.decoder import LayerWeights, ModelWeights, rms_norm
from gpu_worker.models.llama_native import NativeLlama
from gpu_worker.models.rope import RopeConfig, rotate, rotation_table
from gpu_worker.processor import Processor

FLOAT32_TOLERANCE = 5e-6
"""Of numbers near 1, sums of some hundred products in another order."""
NUM_THREADS = 3
"""More than this machine may have cores: what a thread holds must not be lost while another runs."""


@pytest.fixture(scope="module", params=usable_instruction_sets())
def engine(request: pytest.FixtureRequest) -> Engine:
    name: InstructionSet = request.param
    return Engine(Kernels(name), NUM_THREADS)


def flat_rows(rows: Iterable[tuple[int, int]], tables: Tensor | None = None, block_size: int = 16) -> FlatRows:
    """Rows of (query_len, kv_len), every token's last one sampled; tables are block tables, or there is no KV."""
    rows = list(rows)
    num_tokens = sum(query_len for query_len, _ in rows)
    positions = torch.cat([torch.arange(kv_len - query_len, kv_len) for query_len, kv_len in rows])
    slots = torch.zeros(num_tokens, dtype=torch.int64)
    if tables is not None:
        row_of_token = torch.repeat_interleave(torch.tensor([query_len for query_len, _ in rows]))
        slots = tables[row_of_token, positions // block_size] * block_size + positions % block_size
    return FlatRows(
        token_ids=torch.zeros(num_tokens, dtype=torch.int64),
        positions=positions,
        slots=slots,
        sampled=torch.arange(num_tokens),
        query_lens=torch.tensor([query_len for query_len, _ in rows], dtype=torch.int32),
        kv_lens=torch.tensor([kv_len for _, kv_len in rows], dtype=torch.int32),
        block_tables=torch.zeros(len(rows), 1, dtype=torch.int64) if tables is None else tables,
    )


def multiply(
    engine: Engine,
    x: Tensor,
    weights: Tensor,
    weight_type: WeightType = WeightType.FLOAT32,
    epilogue: Epilogue = Epilogue.STORE,
    *,
    output: Tensor | None = None,
    norm: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Run one product, with everything around it that a linear operation may have."""
    outputs = len(weights) // 2 if epilogue is Epilogue.SILU_MUL else len(weights)
    output = torch.full((len(x), outputs), float("nan")) if output is None else output
    program = Program(max_tokens=len(x), max_samples=len(x))
    matrix = engine.kernels.pack(weights, weight_type, epilogue)
    program.linear("product", matrix, x, output, norm=norm, eps=1e-5, bias=bias)
    program.run(engine, flat_rows([(len(x), len(x))]))
    return output


def attention_tolerance(engine: Engine, dtype: torch.dtype) -> float:
    """Keys and values are rounded before both sides read them, so that bfloat16 needs no other tolerance, but where
    queries and weights are rounded to it, too: then one unit of its last place, of numbers around 1."""
    is_rounded = dtype == torch.bfloat16 and engine.kernels.rounds_inputs(WeightType.BFLOAT16)
    return 2**-7 if is_rounded else FLOAT32_TOLERANCE


def as_kept(weights: Tensor, weight_type: WeightType) -> Tensor:
    """Weights after the rounding of their type."""
    match weight_type:
        case WeightType.FLOAT32:
            return weights
        case WeightType.BFLOAT16:
            return weights.to(torch.bfloat16).float()
        case WeightType.INT8:
            scales = weights.abs().amax(dim=1, keepdim=True) / 127
            return (weights / scales).round() * scales


# One row; few, in one block of rows; many, in several of unequal size. Sizes that fill neither panels nor slabs.
@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 14, 16, 67])
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (50, 70), (7, 33)])
@pytest.mark.parametrize("weight_type", WeightType)
def test_a_product_equals_torchs_on_the_weights_as_they_are_kept(
    engine: Engine, weight_type: WeightType, outputs: int, inputs: int, num_rows: int
) -> None:
    torch.manual_seed(0)
    weights, x = torch.randn(outputs, inputs) * inputs**-0.5, torch.randn(num_rows, inputs)
    multiplied = x.bfloat16() if engine.kernels.rounds_inputs(weight_type) else x
    expected = (multiplied.double() @ as_kept(weights, weight_type).double().T).float()
    torch.testing.assert_close(
        multiply(engine, x, weights, weight_type), expected, atol=FLOAT32_TOLERANCE, rtol=FLOAT32_TOLERANCE
    )


@pytest.mark.parametrize("num_rows", [1, 40])
def test_what_an_earlier_batch_left_in_working_memory_does_not_matter(engine: Engine, num_rows: int) -> None:
    torch.manual_seed(0)
    weights, x = torch.randn(50, 33), torch.randn(num_rows, 33)
    expected = multiply(engine, x, weights)
    # One slab more, so that NaN lies where the 33rd input's slab ends in padding.
    multiply(engine, torch.full((num_rows, 64), float("nan")), torch.randn(50, 64))
    assert torch.equal(multiply(engine, x, weights), expected)


@pytest.mark.parametrize("num_rows", [3, 40])
def test_norm_bias_and_what_follows_a_product_are_part_of_it(engine: Engine, num_rows: int) -> None:
    torch.manual_seed(0)
    weights, x = torch.randn(100, 70) * 70**-0.5, torch.randn(num_rows, 70)
    norm, bias, before = torch.randn(70), torch.randn(100), torch.randn(num_rows, 100)
    y = rms_norm(x, norm, 1e-5) @ weights.T + bias
    close: Callable[..., None] = torch.testing.assert_close
    close(multiply(engine, x, weights, norm=norm, bias=bias), y, atol=1e-5, rtol=1e-5)
    added = multiply(engine, x, weights, epilogue=Epilogue.ADD, output=before.clone(), norm=norm, bias=bias)
    close(added, before + y, atol=1e-5, rtol=1e-5)
    gated = multiply(engine, x, weights, epilogue=Epilogue.SILU_MUL, norm=norm, bias=bias)
    close(gated, functional.silu(y[:, :50]) * y[:, 50:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("weight_type", WeightType)
def test_an_embedding_is_a_row_of_the_packed_matrix(engine: Engine, weight_type: WeightType) -> None:
    torch.manual_seed(0)
    weights = torch.randn(50, 70)
    program = Program(max_tokens=20, max_samples=0)
    output = program.token_buffer(70)
    program.embed(engine.kernels.pack(weights, weight_type), output, multiplier=2.0)
    batch = flat_rows([(20, 20)])
    batch.token_ids.copy_(torch.randint(0, 50, (20,)))
    program.run(engine, FlatRows(**{**_fields(batch), "sampled": batch.sampled[:0]}))
    torch.testing.assert_close(output, 2 * as_kept(weights, weight_type)[batch.token_ids], atol=1e-6, rtol=1e-6)


def _fields(batch: FlatRows) -> dict[str, Tensor]:
    return {name: getattr(batch, name) for name in FlatRows.__dataclass_fields__}


class Pages:
    """A pool in which every request's blocks are strewn, and what nobody owns is NaN."""

    def __init__(
        self, rows: list[tuple[int, int]], heads: HeadShape, *, block_size: int, dtype: torch.dtype, is_by_head: bool
    ) -> None:
        torch.manual_seed(0)
        counts = [-(-kv_len // block_size) for _, kv_len in rows]
        num_blocks = sum(counts) + 5
        allocate = KvCache.allocate_by_head if is_by_head else KvCache.allocate
        cache = allocate(
            num_layers=1,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            dtype=dtype,
        )
        self.heads = heads
        self.keys, self.values = cache.keys[0].fill_(float("nan")), cache.values[0].fill_(float("nan"))
        free = list(range(num_blocks))
        random.Random(0).shuffle(free)
        self.tables = torch.empty(len(rows), max(counts), dtype=torch.int64)
        for index, (count, (_, kv_len)) in enumerate(zip(counts, rows, strict=True)):
            blocks, free = free[:count], free[count:]
            self.tables[index, :count] = torch.tensor(blocks)
            self.tables[index, count:] = blocks[-1]
            positions = torch.arange(kv_len)
            places = (self.tables[index, positions // block_size], positions % block_size)
            self.keys[places] = torch.randn(kv_len, heads.num_kv_heads, heads.head_dim).to(dtype)
            self.values[places] = torch.randn(kv_len, heads.num_kv_heads, heads.head_dim).to(dtype)
        self.rows = rows
        self.num_tokens = sum(query_len for query_len, _ in rows)
        self.queries = torch.randn(self.num_tokens, heads.num_heads * heads.head_dim)

    def attend(self, engine: Engine) -> Tensor:
        return self._attend(engine, self.queries, self.rows)

    def attend_by(self, engine: Engine, num_queries: int) -> Tensor:
        """The same for the only request, so many of its queries at a time."""
        ((query_len, kv_len),) = self.rows
        start = kv_len - query_len
        parts = []
        for first in range(0, query_len, num_queries):
            queries = self.queries[first : first + num_queries]
            parts.append(self._attend(engine, queries, [(len(queries), start + first + len(queries))]))
        return torch.cat(parts)

    def _attend(self, engine: Engine, queries: Tensor, rows: list[tuple[int, int]]) -> Tensor:
        program = Program(max_tokens=len(queries), max_samples=len(queries))
        output = program.token_buffer(queries.shape[1]).fill_(float("nan"))
        program.attend(queries, output, self.keys, self.values, self.heads)
        program.run(engine, flat_rows(rows, self.tables, self.keys.shape[1]))
        return output

    def expected(self) -> Tensor:
        """Attention of the same queries by the reference; with a window, by one query at a time over its last keys."""
        by_head = self.queries.view(self.num_tokens, self.heads.num_heads, self.heads.head_dim)
        keys, values = self.keys.float(), self.values.float()
        rows, tables = self.rows, self.tables
        if self.heads.window:
            return torch.cat([self._windowed(index, by_head) for index in range(len(rows))]).flatten(1)
        layout = BatchLayout(
            query_lens=tuple(query_len for query_len, _ in rows),
            kv_lens=tuple(kv_len for _, kv_len in rows),
            block_tables=tables,
        )
        seen = ReferenceBatch(layout, window=None, scale=self.heads.head_dim**-0.5)
        # The reference drops what lies behind a request's end only after it has looked: so it may see no NaN there.
        return ReferenceAttention().attend(by_head, keys.nan_to_num(), values.nan_to_num(), seen).flatten(1)

    def _windowed(self, index: int, by_head: Tensor) -> Tensor:
        (query_len, kv_len), group = self.rows[index], self.heads.num_heads // self.heads.num_kv_heads
        first = sum(length for length, _ in self.rows[:index])
        keys, values = (
            pool[self.tables[index]].flatten(0, 1)[:kv_len].float().repeat_interleave(group, dim=1)
            for pool in (self.keys, self.values)
        )
        attended = []
        for query in range(query_len):
            end = kv_len - query_len + query + 1
            seen = slice(max(0, end - self.heads.window), end)
            scores = torch.einsum("hd,khd->hk", by_head[first + query], keys[seen]) * self.heads.head_dim**-0.5
            attended.append(torch.einsum("hk,khd->hd", scores.softmax(dim=-1), values[seen]))
        return torch.stack(attended)


# Steps of 64 keys and parts of 256 are crossed by decodes and by chunks; tiles of queries, by the chunk of 70.
HYBRID = [(1, 1), (1, 300), (5, 90), (70, 330), (1, 530), (33, 33)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("head_dim", "group", "block_size", "is_by_head"),
    [(64, 3, 16, True), (64, 1, 16, False), (128, 4, 32, True), (80, 8, 16, True), (16, 3, 5, True)],
)
def test_attention_over_a_hybrid_batch_equals_the_reference(
    engine: Engine, head_dim: int, group: int, block_size: int, is_by_head: bool, dtype: torch.dtype
) -> None:
    heads = HeadShape(num_heads=2 * group, num_kv_heads=2, head_dim=head_dim)
    pages = Pages(HYBRID, heads, block_size=block_size, dtype=dtype, is_by_head=is_by_head)
    tolerance = attention_tolerance(engine, dtype)
    torch.testing.assert_close(pages.attend(engine), pages.expected(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("head_dim", "group"), [(64, 1), (64, 3), (64, 8), (128, 4)])
@pytest.mark.parametrize("context", [0, 1, 63, 255, 1000, 2000])
def test_chunks_of_any_size_behind_any_context_equal_the_reference(
    engine: Engine, context: int, head_dim: int, group: int
) -> None:
    heads = HeadShape(num_heads=group, num_kv_heads=1, head_dim=head_dim)
    # A part of a block of rows, several, a tile and a part of the next: each alone, so that few tiles are shared out.
    for query_len in (1, 7, 17, 64):
        rows = [(query_len, context + query_len)]
        pages = Pages(rows, heads, block_size=16, dtype=torch.bfloat16, is_by_head=True)
        torch.testing.assert_close(
            pages.attend(engine),
            pages.expected(),
            atol=attention_tolerance(engine, torch.bfloat16),
            rtol=attention_tolerance(engine, torch.bfloat16),
            msg=f"{query_len} queries: {{}}".format,
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("head_dim", "group"), [(16, 3), (64, 3), (64, 1), (128, 8)])
def test_how_many_queries_are_attended_at_a_time_does_not_change_a_bit(
    engine: Engine, head_dim: int, group: int, dtype: torch.dtype
) -> None:
    heads = HeadShape(num_heads=group, num_kv_heads=1, head_dim=head_dim)
    pages = Pages([(60, 330)], heads, block_size=16, dtype=dtype, is_by_head=True)
    attended = pages.attend(engine)
    for num_queries in (1, 2, 7, 33):
        assert torch.equal(pages.attend_by(engine, num_queries), attended), num_queries


def test_nor_does_it_where_numbers_are_too_small_to_be_normal(engine: Engine) -> None:
    heads = HeadShape(num_heads=3, num_kv_heads=1, head_dim=64)
    pages = Pages([(20, 150)], heads, block_size=16, dtype=torch.bfloat16, is_by_head=True)
    pages.values.mul_(2.0**-126)
    assert torch.equal(pages.attend_by(engine, 1), pages.attend(engine))


def test_how_many_threads_share_a_chunks_keys_does_not_change_a_bit(engine: Engine) -> None:
    heads = HeadShape(num_heads=6, num_kv_heads=2, head_dim=64)
    pages = Pages([(40, 1040), (1, 700)], heads, block_size=16, dtype=torch.bfloat16, is_by_head=True)
    attended = pages.attend(engine)  # Three threads split these tiles; one has enough of them.
    assert torch.equal(pages.attend(Engine(engine.kernels, 1)), attended)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [1, 40, 300])
def test_a_window_hides_what_lies_further_back(engine: Engine, window: int, dtype: torch.dtype) -> None:
    heads = HeadShape(num_heads=6, num_kv_heads=2, head_dim=32, window=window)
    pages = Pages(HYBRID, heads, block_size=16, dtype=dtype, is_by_head=True)
    tolerance = attention_tolerance(engine, dtype)
    torch.testing.assert_close(pages.attend(engine), pages.expected(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_by_head", [True, False])
def test_queries_and_keys_are_turned_and_keys_and_values_stored(
    engine: Engine, is_by_head: bool, dtype: torch.dtype
) -> None:
    heads = HeadShape(num_heads=6, num_kv_heads=2, head_dim=32)
    pages = Pages([(9, 40), (1, 7)], heads, block_size=16, dtype=dtype, is_by_head=is_by_head)
    batch = flat_rows(pages.rows, pages.tables)
    cosine, sine = rotation_table(RopeConfig(theta=10000.0), 32, 64, torch.float32)
    projected, query_norm, key_norm = torch.randn(10, 10 * 32), torch.randn(32), torch.randn(32)
    by_head = projected.view(10, 10, 32).clone()
    by_head[:, :6], by_head[:, 6:8] = (
        rms_norm(by_head[:, :6], query_norm, 1e-5),
        rms_norm(by_head[:, 6:8], key_norm, 1e-5),
    )
    turned = rotate(by_head[:, :8], cosine[batch.positions].unsqueeze(1), sine[batch.positions].unsqueeze(1))
    program = Program(max_tokens=10, max_samples=10)
    program.rotate_and_store(
        projected, cosine, sine, pages.keys, pages.values, heads, query_norm=query_norm, key_norm=key_norm, eps=1e-5
    )
    program.run(engine, batch)
    close: Callable[..., None] = torch.testing.assert_close
    close(projected.view(10, 10, 32)[:, :6], turned[:, :6], atol=FLOAT32_TOLERANCE, rtol=FLOAT32_TOLERANCE)
    places = (batch.slots // 16, batch.slots % 16)
    tolerance = FLOAT32_TOLERANCE if dtype == torch.float32 else 2**-8  # An ulp: sums differ before they are rounded.
    close(pages.keys[places].float(), turned[:, 6:], atol=tolerance, rtol=tolerance)
    close(pages.values[places], by_head[:, 8:].to(dtype), atol=0, rtol=0)


def tiny_config(head_dim: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=61,
        hidden_size=48,
        intermediate_size=72,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=10000.0),
        max_model_len=512,
        is_tied=True,
    )


REQUEST_LEN = 300
BLOCK_SIZE = 16


def tiny_weights(config: ModelConfig) -> ModelWeights:
    torch.manual_seed(0)

    def matrix(outputs: int, inputs: int) -> Tensor:
        return torch.randn(outputs, inputs).div_(inputs**0.5)

    embedding = torch.randn(config.vocab_size, config.hidden_size)
    empty = torch.empty(0)
    return ModelWeights(
        embedding=embedding,
        layers=tuple(
            LayerWeights(
                attention_norm=torch.rand(48),
                query_key_value=matrix(10 * config.head_dim, 48),
                attention_output=matrix(48, 6 * config.head_dim),
                mlp_norm=torch.rand(48),
                gate_up=matrix(2 * 72, 48),
                down=matrix(48, 72),
            )
            for _ in range(config.num_layers)
        ),
        final_norm=torch.rand(48),
        head=embedding,
        cosine=empty,
        sine=empty,
    )


class InvariantWorld:
    """A tiny model that computes the logits of every position of some requests, in iterations as a test cuts them."""

    def __init__(
        self, engine: Engine, dtype: torch.dtype, head_dim: int = 16, weight_type: WeightType | None = None
    ) -> None:
        self._engine = engine
        self._dtype = dtype
        self._weight_type = weight_type or (WeightType.BFLOAT16 if dtype == torch.bfloat16 else WeightType.FLOAT32)
        self._config = tiny_config(head_dim)
        self._weights = tiny_weights(self._config)
        self.token_ids = torch.randint(0, self._config.vocab_size, (3, REQUEST_LEN))

    def logits(self, cuts: list[list[int]]) -> Tensor:
        """Return (requests, positions, vocab). cuts[i] are the chunk lengths of request i, which sum to its length.

        Chunks of the same place in their lists run side by side.
        """
        num_blocks = -(-REQUEST_LEN // BLOCK_SIZE)
        cache = KvCache.allocate_by_head(
            num_layers=self._config.num_layers,
            num_blocks=3 * num_blocks,
            block_size=BLOCK_SIZE,
            num_kv_heads=self._config.num_kv_heads,
            head_dim=self._config.head_dim,
            dtype=self._dtype,
        )
        model = NativeLlama(
            self._engine,
            self._config,
            self._weights,
            cache,
            weight_type=self._weight_type,
            max_model_len=self._config.max_model_len,
            max_tokens=3 * REQUEST_LEN,
            max_samples=3 * REQUEST_LEN,
        )
        tables = torch.arange(3 * num_blocks).view(num_blocks, 3).T.contiguous()  # The requests' blocks take turns.
        logits = torch.full((3, REQUEST_LEN, self._config.vocab_size), float("nan"))
        starts = [0, 0, 0]
        for place in range(max(len(lengths) for lengths in cuts)):
            chunks = [(request, lengths[place]) for request, lengths in enumerate(cuts) if place < len(lengths)]
            batch = flat_rows(
                [(length, starts[request] + length) for request, length in chunks],
                tables[[request for request, _ in chunks]],
                BLOCK_SIZE,
            )
            batch.token_ids.copy_(
                torch.cat([self.token_ids[request, starts[request] :][:length] for request, length in chunks])
            )
            computed = model.forward(batch)
            for request, length in chunks:
                logits[request, starts[request] : starts[request] + length] = computed[:length]
                computed = computed[length:]
                starts[request] += length
        return logits


def cut(length: int) -> st.SearchStrategy[list[int]]:
    """Chunk lengths that sum to length: many of one token, some large."""
    sizes = st.one_of(st.just(1), st.integers(1, 20), st.integers(1, length))

    def whole(parts: list[int]) -> list[int]:
        kept, rest = [], length
        for part in parts:
            if rest > 0:
                kept.append(min(part, rest))
                rest -= kept[-1]
        return [*kept, rest] if rest else kept

    return st.lists(sizes, min_size=1, max_size=30).map(whole)


# Tiles of AMX take heads of a multiple of 32; others are multiplied as without them.
@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize(
    ("dtype", "weight_type"), [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, WeightType.INT8)]
)
def test_logits_depend_on_neither_chunks_nor_neighbours_to_the_bit(
    engine: Engine, dtype: torch.dtype, weight_type: WeightType | None, head_dim: int
) -> None:
    world = InvariantWorld(engine, dtype, head_dim, weight_type)
    whole = world.logits([[REQUEST_LEN]] * 3)
    assert not whole.isnan().any()

    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
    @given(cuts=st.tuples(*[cut(REQUEST_LEN)] * 3))
    def check(cuts: tuple[list[int], ...]) -> None:
        assert torch.equal(world.logits(list(cuts)), whole)

    check()


def test_logits_do_not_depend_on_the_number_of_threads() -> None:
    kernels = find_kernels("auto")
    assert kernels is not None
    one, four = (InvariantWorld(Engine(kernels, threads), torch.float32) for threads in (1, 4))
    four.token_ids.copy_(one.token_ids)
    cuts = [[100, 200], [1] * 40 + [260], [300]]
    assert torch.equal(one.logits(cuts), four.logits(cuts))


def test_a_batch_that_names_what_does_not_exist_is_refused(engine: Engine) -> None:
    config = tiny_config(head_dim=16)
    cache = KvCache.allocate_by_head(
        num_layers=2, num_blocks=4, block_size=16, num_kv_heads=2, head_dim=16, dtype=torch.float32
    )
    model = NativeLlama(
        engine,
        config,
        tiny_weights(config),
        cache,
        weight_type=WeightType.FLOAT32,
        max_model_len=40,
        max_tokens=64,
        max_samples=64,
    )
    tables = torch.arange(4).view(1, 4)
    with pytest.raises(IndexError, match="positions 38 to 40 of a batch are not all below 40"):
        model.forward(flat_rows([(3, 41)], tables))
    with pytest.raises(IndexError, match="blocks 0 to 4"):
        model.forward(flat_rows([(3, 3)], torch.tensor([[0, 4]])))
    batch = flat_rows([(3, 3)], tables)
    batch.token_ids.fill_(61)
    with pytest.raises(IndexError, match="tokens 61 to 61"):
        model.forward(batch)


def test_a_library_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = build("portable")
    assert first.is_relative_to(tmp_path)
    written_ns = first.stat().st_mtime_ns
    assert build("portable") == first
    assert first.stat().st_mtime_ns == written_ns
    assert list(first.parent.iterdir()) == [first]
    # An image may hold the library and no compiler.
    monkeypatch.setenv("PATH", "")
    assert build("portable") == first


def test_without_a_compiler_or_with_one_that_fails_the_reason_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KernelsUnavailable, match=r"no C\+\+ compiler found; looked for g\+\+, clang\+\+, c\+\+"):
        build("portable")
    assert find_kernels("auto") is None
    with pytest.raises(KernelsUnavailable):
        find_kernels("portable")
    compiler = tmp_path / "g++"
    compiler.write_text('#!/bin/sh\necho "x.cpp:1: error: no such thing" >&2\nexit 1\n')
    compiler.chmod(0o755)
    with pytest.raises(KernelsUnavailable, match=r"failed: x\.cpp:1: error: no such thing"):
        build("portable")


def test_a_compiler_that_is_older_than_the_processor_makes_what_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows of no instruction set: here the real one behind a script that refuses -mavx512f and its like."""
    compiler = tmp_path / "g++"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *" -m"*) exit 1;; esac\nexec {shutil.which("g++")} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    kernels = find_kernels("auto")
    assert kernels is not None
    assert kernels.instruction_set == "portable"


def test_of_two_that_a_processor_has_its_vendor_decides_which_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    features = frozenset({"fma", "avx2", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16"})
    for vendor, fastest in (("AuthenticAMD", "avx512bf16"), ("GenuineIntel", "avx512")):
        monkeypatch.setattr(Processor, "read", lambda vendor=vendor: Processor(vendor=vendor, features=features))
        usable = usable_instruction_sets()
        assert usable[0] == fastest
        assert set(usable) == {"avx512bf16", "avx512", "avx2", "portable"}


WITH_A_SIGNAL_STACK_THAT_HAS_NO_ROOM_FOR_TILES = """
import ctypes
from gpu_worker.kernels.library import find_kernels

class Stack(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))

memory = ctypes.create_string_buffer(4096)
stack = Stack(ctypes.addressof(memory), 0, len(memory))
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0
print(find_kernels("auto").instruction_set)
find_kernels("amx")
"""


@pytest.mark.skipif("amx" not in usable_instruction_sets(), reason="a processor without AMX")
def test_a_system_that_grants_no_tiles_gets_the_next_kernels() -> None:
    command = [sys.executable, "-c", WITH_A_SIGNAL_STACK_THAT_HAS_NO_ROOM_FOR_TILES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == usable_instruction_sets()[1]
    assert "the system does not let kernels for amx run: No space left on device" in done.stderr


def test_kernels_of_another_machine_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Processor, "read", Processor)
    with pytest.raises(KernelsUnavailable, match="kernels for avx512 cannot run here; this machine runs portable"):
        find_kernels("avx512")


def test_switched_off_means_none() -> None:
    assert shutil.which("g++") is not None or shutil.which("clang++") is not None
    assert find_kernels("off") is None
