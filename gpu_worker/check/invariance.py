"""Are a request's logits its own affair, to the bit? The engine of --deterministic, in batch after batch."""

from typing import Any

import torch
from torch import Tensor

from gpu_worker.check.dense import dense_logits
from gpu_worker.check.engine import MAX_DENSE_ERROR, forced, prefilled
from gpu_worker.check.kernels import relative_error
from gpu_worker.check.setup import Bench, random_tokens

CHUNK_LENS = (7, 64, 500)


def check_invariance(bench: Bench, prompt_len: int, num_decodes: int, num_neighbours: int) -> dict[str, Any]:
    """Compare the logits after one request's tokens, computed in every way there is.

    Returns:
        The relative error against the dense model, the seconds of a capture, and `wrong`: the ways that differ in any
        bit from a whole prompt's, or the dense model if it is beyond its bound.
    """
    tokens = random_tokens(prompt_len + num_decodes, bench.scale.config.vocab_size, seed=6)
    runner = bench.invariant_runner(max_num_slots=1 + num_neighbours)
    whole = prefilled(bench, runner, tokens[:prompt_len], chunk_len=prompt_len)
    ways: dict[str, tuple[Tensor, Tensor]] = {}
    for chunk_len in (length for length in CHUNK_LENS if length < prompt_len):
        ways[f"chunks of {chunk_len}"] = prefilled(bench, runner, tokens[:prompt_len], chunk_len), whole
    beside = prefilled(bench, runner, tokens[:prompt_len], max(1, prompt_len // 3), num_neighbours)
    ways[f"beside {num_neighbours} decodes"] = beside, whole
    decoded = forced(bench, runner, tokens, prompt_len)  # (decodes, vocab)
    again = prefilled(bench, runner, tokens, len(tokens))
    ways["decodes, and recomputed"] = decoded[-1], again
    seconds = runner.warm_up()
    ways["decodes out of a graph"] = forced(bench, runner, tokens, prompt_len), decoded
    wrong = [name for name, (mine, other) in ways.items() if not torch.equal(mine, other)]
    error = relative_error(again, dense_logits(bench.model, tokens)[-1])
    if not error < MAX_DENSE_ERROR[bench.scale.dtype]:
        wrong.append("dense model")
    return {
        "error": float(f"{error:.2e}"),
        "ways": len(ways),
        "seconds_to_capture": round(seconds, 2),
        "wrong": wrong,
    }
