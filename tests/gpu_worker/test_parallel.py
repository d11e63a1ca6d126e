"""Shards against the whole model: what ranks load, and what they compute together."""

import os
import subprocess
import sys
import threading
import time
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.messages.ranks import StageDone
from common.messages.requests import Sampling
from common.models import find_model
from gpu_worker.batch import flatten
from gpu_worker.errors import UnusableModel
from gpu_worker.loading import open_model
from gpu_worker.parallel.directory import make_directory
from gpu_worker.parallel.group import Group
from gpu_worker.parallel.layout import Layout
from gpu_worker.parallel.shard import shard
from gpu_worker.parallel.stage import HostStage, Returns
from gpu_worker.profile import made_up_row
from gpu_worker.slots import Limits, Row
from tests.gpu_worker.hf import TINY_VOCAB_SIZE, tiny_llama, tiny_of
from tests.gpu_worker.ranks import in_ranks, stage_forward
from tests.gpu_worker.world import World, load

LIMITS = Limits(
    vocab_size=TINY_VOCAB_SIZE, max_model_len=1024, block_size=4, num_blocks=64, max_num_slots=8, max_chunk_tokens=128
)
TOLERANCE = 2e-4
"""Of float32 logits near 10, summed in another order in every layer."""


def iterations() -> list[list[Row]]:
    """Two iterations: two prompts, one of them in part; then a decode beside the rest of the other."""
    first = [made_up_row(LIMITS, 0, 0, 9, first_block=0), made_up_row(LIMITS, 1, 0, 13, first_block=8)]
    second = [made_up_row(LIMITS, 0, 9, 1, first_block=0), made_up_row(LIMITS, 1, 13, 8, first_block=8)]
    return [[first[0], replace(first[1], is_sampled=False)], second]


def forgotten(rows: list[Row]) -> list[Row]:
    """The same rows where no token is known."""
    return [
        replace(row, resident=replace(row.resident, token_ids=array("i", [0] * len(row.resident.token_ids))))
        for row in rows
    ]


def host_stage(path: Path, group: Group) -> HostStage:
    forward, kv_cache, model = stage_forward(path, group, LIMITS)
    return HostStage(group.layout, forward, kv_cache, model.eos_token_ids, LIMITS.max_num_slots, timeout_s=30)


def whole_logits(path: Path) -> list[Tensor]:
    world = World(load(path), block_size=LIMITS.block_size, num_blocks=LIMITS.num_blocks)
    with torch.inference_mode():
        return [world.runner.logits(rows).clone() for rows in iterations()]


@pytest.mark.parametrize(
    ("tp", "pp", "num_heads", "num_kv_heads", "is_tied"),
    [
        (2, 1, 4, 2, True),
        (2, 1, 6, 6, False),
        (2, 1, 2, 1, False),  # Both ranks hold the one key-value head.
        (4, 1, 8, 2, True),  # Two ranks hold each.
        (1, 2, 4, 2, True),
        (1, 3, 3, 3, False),
        (2, 2, 4, 1, False),
    ],
)
def test_ranks_compute_the_logits_of_the_whole_model(
    tmp_path: Path, tp: int, pp: int, num_heads: int, num_kv_heads: int, is_tied: bool
) -> None:
    tiny_llama(tmp_path, num_attention_heads=num_heads, num_key_value_heads=num_kv_heads, is_tied=is_tied)
    expected = whole_logits(tmp_path)

    def run(layout: Layout, group: Group) -> list[Tensor]:
        forward, _, _ = stage_forward(tmp_path, group, LIMITS)
        logits = []
        with torch.inference_mode():
            for rows in iterations():
                known = rows if layout.rank == 0 else forgotten(rows)
                logits.append(forward(flatten(known, LIMITS.block_size)))
        return logits

    by_rank = in_ranks(tp, pp, run)
    sampling = (pp - 1) * tp
    for ours, theirs in zip(by_rank[sampling], expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)
    assert all(len(logits) == 0 for rank, part in enumerate(by_rank) if rank != sampling for logits in part)


def test_each_rank_holds_its_share_and_together_they_hold_the_model_once(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path, num_attention_heads=4, num_key_value_heads=2)
    num_shared = sum(value.numel() for name, value in model.named_parameters() if name.endswith("norm.weight"))
    num_split = sum(value.numel() for value in model.parameters()) - num_shared
    source = open_model(find_model(str(tmp_path)))
    num_read: list[int] = []

    def count(name: str, rows: slice, columns: slice) -> Tensor:
        assert source.read_part is not None
        part = source.read_part(name, rows, columns)
        num_read[-1] += part.numel() if part.dim() > 1 else 0
        return part

    counted = replace(source, read=lambda name: count(name, slice(None), slice(None)), read_part=count)
    for rank in range(4):
        num_read.append(0)
        part = shard(counted, Layout(tp=2, pp=2, rank=rank))
        for name in sorted(part.tensor_names - {"lm_head.weight"}):
            part.read(name)
    assert sum(num_read) == num_split
    assert max(num_read) < 0.6 * num_split, "no rank of four holds more than its stage's half and an extra layer"


def test_a_rank_with_few_key_value_heads_holds_those_that_its_queries_read() -> None:
    heads = [Layout(tp=8, pp=1, rank=rank).kv_heads(32, 4) for rank in range(8)]
    assert heads == [range(head, head + 1) for head in (0, 0, 1, 1, 2, 2, 3, 3)]
    assert [Layout(tp=2, pp=1, rank=rank).kv_heads(32, 4) for rank in range(2)] == [range(2), range(2, 4)]


def test_stages_and_shares_are_as_equal_as_can_be() -> None:
    assert [Layout(tp=1, pp=3, rank=rank).layers(32) for rank in range(3)] == [range(11), range(11, 22), range(22, 32)]
    words = [Layout(tp=4, pp=1, rank=rank).columns(199) for rank in range(4)]
    assert [len(share) for share in words] == [50, 50, 50, 49]
    assert (words[0].start, words[-1].stop) == (0, 199)


@pytest.mark.parametrize(
    ("tp", "pp", "words"),
    [
        (3, 1, ["--tp is 3", "4 heads"]),
        (4, 1, ["--tp is 4", "3 key-value heads"]),
        (16, 1, ["--tp is 16", "72"]),
        (1, 4, ["--pp is 4", "3 layers"]),
    ],
)
def test_a_model_that_does_not_come_apart_is_refused_with_the_numbers(tp: int, pp: int, words: list[str]) -> None:
    num_heads, num_kv_heads = {3: (4, 4), 4: (12, 3), 16: (16, 16), 1: (4, 4)}[tp]
    with pytest.raises(UnusableModel) as refusal:
        Layout(tp=tp, pp=pp, rank=0).check(
            num_layers=3, num_heads=num_heads, num_kv_heads=num_kv_heads, intermediate_size=72
        )
    for word in words:
        assert word in str(refusal.value)


def test_ranks_report_the_tokens_where_they_are_drawn_and_bubbles_where_they_wait(tmp_path: Path) -> None:
    tiny_llama(tmp_path, num_attention_heads=2, num_key_value_heads=1)
    world = World(load(tmp_path), block_size=LIMITS.block_size, num_blocks=LIMITS.num_blocks)
    expected = [world.runner.run(rows).token_ids for rows in iterations()]
    delay_s = 0.5
    are_loaded = threading.Barrier(2, timeout=60)

    def run(layout: Layout, group: Group) -> tuple[list[tuple[int, ...]], int]:
        stage, reports = host_stage(tmp_path, group), list[StageDone]()
        are_loaded.wait()  # Else the first stage might be through before the last begins to wait for it.
        for rows in iterations():
            if layout.is_first_stage:
                time.sleep(delay_s)  # The stage behind it has nothing to do meanwhile.
            stage.run(rows, reports.append)
        return [done.token_ids for done in reports], sum(done.bubble_ns for done in reports)

    first, last = in_ranks(1, 2, run)
    assert [list(tokens) for tokens in last[0]] == expected
    assert first[0] == [(), ()]
    assert first[1] == 0
    assert last[1] > delay_s * 1e9


def test_a_rank_that_is_gone_fails_the_others_collectives() -> None:
    def run(layout: Layout, group: Group) -> None:
        if layout.rank == 0:
            group.reduce(torch.ones(4))
        # The other rank leaves, and with it goes its end of the connection.

    with pytest.raises(RuntimeError, match=r"(?i)connection|closed|reset"):
        in_ranks(2, 1, run, do_stay=False)


def test_rows_wait_for_the_tokens_that_the_last_stage_samples() -> None:
    returns = Returns(timeout_s=30)
    row = made_up_row(LIMITS, 0, 0, 5, first_block=0)
    returns.expect([row])
    decode = Row(row.resident, 5, 1, is_sampled=True)
    assert returns.take_for([row]) == 0, "a prompt is known"
    threading.Timer(0.5, lambda: returns.put([42])).start()
    assert returns.take_for([decode]) > 0
    assert row.resident.token_ids[5] == 42


def test_a_token_that_never_comes_ends_the_wait_with_an_error() -> None:
    returns = Returns(timeout_s=0.05)
    row = made_up_row(LIMITS, 0, 0, 5, first_block=0)
    returns.expect([row])
    with pytest.raises(RuntimeError, match=r"0\.05 s"):
        returns.take_for([Row(row.resident, 5, 1, is_sampled=True)])
    returns.close()
    with pytest.raises(RuntimeError, match="stopped"):
        returns.take_for([Row(row.resident, 5, 1, is_sampled=True)])


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3", "gemma3", "phi3"])
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_every_family_comes_apart(tmp_path: Path, family: str, tp: int, pp: int) -> None:
    tiny_of(family, tmp_path, groups=4, head_dim=16)
    expected = whole_logits(tmp_path)

    def run(layout: Layout, group: Group) -> list[Tensor]:
        forward, _, _ = stage_forward(tmp_path, group, LIMITS)
        with torch.inference_mode():
            return [forward(flatten(rows, LIMITS.block_size)) for rows in iterations()]

    by_rank = in_ranks(tp, pp, run)
    for ours, theirs in zip(by_rank[(pp - 1) * tp], expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


def test_ranks_score_a_prompt_that_takes_several_passes(tmp_path: Path) -> None:
    tiny_llama(tmp_path, num_attention_heads=2, num_key_value_heads=1)
    sampling = Sampling(temperature=0.0, logprobs=2, prompt_logprobs=1)

    def rows() -> list[Row]:
        row = made_up_row(LIMITS, 0, 0, 2 * LIMITS.max_num_slots + 3, first_block=0)
        return [replace(row, resident=replace(row.resident, sampling=sampling))]

    world = World(load(tmp_path), block_size=LIMITS.block_size, num_blocks=LIMITS.num_blocks)
    whole = world.runner.run(rows())

    def run(layout: Layout, group: Group) -> StageDone:
        reports: list[StageDone] = []
        host_stage(tmp_path, group).run(rows(), reports.append)
        return reports[0]

    for tp, pp in ((2, 1), (1, 2)):
        *_, done = reversed(in_ranks(tp, pp, run)) if pp == 1 else in_ranks(tp, pp, run)
        assert (list(done.slots), list(done.token_ids)) == (whole.slots, whole.token_ids)
        for ours, theirs in zip(
            (*done.sampled_scores, *done.prompt_scores), (*whole.sampled_scores, *whole.prompt_scores), strict=True
        ):
            assert (ours.slot, ours.first_index) == (theirs.slot, theirs.first_index)
            assert ours.scores.num_tokens == theirs.scores.num_tokens
            for (score, _), (wanted, _) in zip(ours.scores, theirs.scores, strict=True):
                assert score == pytest.approx(wanted, abs=TOLERANCE)


def test_the_directory_of_a_killed_process_is_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(30)
    for name in (f"legato-ranks-{ended.pid}-abc", f"legato-ranks-{os.getppid()}-abc", "legato-ranks-other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "link").touch()
    mine = make_directory()
    assert mine.stat().st_mode & 0o777 == 0o700
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {mine.name, f"legato-ranks-{os.getppid()}-abc", "legato-ranks-other"}
