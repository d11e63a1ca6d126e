"""Is the engine right? Chunks, hybrid batches, decodes, graphs and log-probabilities against the dense model."""

from typing import Any

import torch
from torch import Tensor

from common.messages.logprobs import MAX_TOP
from common.messages.requests import Sampling
from gpu_worker.check.dense import dense_logits
from gpu_worker.check.kernels import relative_error
from gpu_worker.check.setup import Bench, random_tokens, resident_of
from gpu_worker.cuda.runner import CudaRunner
from gpu_worker.slots import Row

MAX_DENSE_ERROR = {torch.bfloat16: 4e-2, torch.float32: 1e-4}
"""Of bfloat16's, rounding alone takes 1.4e-2: 32 layers of width 1,024 on a CPU, with weights as build_bench draws."""
MAX_CHUNKING_ERROR = MAX_DENSE_ERROR
"""Another number of rows is another product's kernel, whose sums round elsewhere: no nearer than two that are right."""
MAX_GRAPH_ERROR = 1e-3
"""Of logits out of a graph: the same kernels, but a batch that is filled up may take another product's kernel."""
TIE = 5.0
"""Best tokens must agree where the gap to the second is above so many times the error."""
MAX_NEIGHBOURS = 8


def check_engine(bench: Bench, prompt_len: int, num_decodes: int) -> dict[str, Any]:
    """Compare the engine's logits after a prompt, and after forced tokens, with the dense model's.

    Returns:
        Relative errors by case, whether best tokens agree, and `wrong`, the cases that are beyond their bound.
    """
    scale, dtype = bench.scale, bench.scale.dtype
    tokens = random_tokens(prompt_len + num_decodes, scale.config.vocab_size, seed=5)
    expected = dense_logits(bench.model, tokens)  # (tokens, vocab)
    prompt = tokens[:prompt_len]
    whole = prefilled(bench, bench.runner, prompt, chunk_len=prompt_len)
    errors = {"whole prompt": relative_error(whole, expected[prompt_len - 1])}
    bounds = {"whole prompt": MAX_DENSE_ERROR[dtype]}
    for chunk_len in (64, 512) if prompt_len > 64 else (7,):
        case = f"chunks of {chunk_len}"
        errors[case] = relative_error(prefilled(bench, bench.runner, prompt, chunk_len), whole)
        bounds[case] = MAX_CHUNKING_ERROR[dtype]
    errors["hybrid"] = relative_error(prefilled(bench, bench.runner, prompt, max(1, prompt_len // 3), 8), whole)
    bounds["hybrid"] = MAX_CHUNKING_ERROR[dtype]
    eager = forced(bench, bench.runner_of(bench.backend), tokens, prompt_len)
    errors["decodes"] = relative_error(eager, expected[prompt_len:])
    bounds["decodes"] = MAX_DENSE_ERROR[dtype]
    if bench.runner.buckets:
        replayed = forced(bench, bench.runner, tokens, prompt_len)
        errors["decodes out of a graph"] = relative_error(replayed, eager)
        bounds["decodes out of a graph"] = MAX_GRAPH_ERROR
    errors["log-probabilities"] = _scores_error(bench, prompt, expected[:prompt_len])
    bounds["log-probabilities"] = MAX_DENSE_ERROR[dtype]
    best = eager.float().topk(2, dim=1)
    gap = best.values[:, 0] - best.values[:, 1]
    error = (eager.float() - expected[prompt_len:]).abs().amax(dim=1)
    is_clear = gap > TIE * error
    agrees = best.indices[:, 0] == expected[prompt_len:].argmax(dim=1)
    wrong = [case for case in errors if not errors[case] < bounds[case]]
    if bool((is_clear & ~agrees).any()):
        wrong.append("best tokens")
    return {
        "errors": {case: float(f"{error:.2e}") for case, error in errors.items()},
        "clear_best_tokens": int(is_clear.sum()),
        "agreeing_best_tokens": int(agrees.sum()),
        "of": num_decodes,
        "wrong": wrong,
    }


def _scores_error(bench: Bench, prompt: list[int], logits: Tensor) -> float:
    """Return the relative error of a prompt's log-probabilities, of the token that is drawn after it, and of the
    likeliest in each one's place; logits are the dense model's, (tokens, vocab)."""
    sampling = Sampling(temperature=0.0, logprobs=MAX_TOP, prompt_logprobs=MAX_TOP)
    resident = resident_of(0, prompt, blocks_of(bench, len(prompt)), sampling)
    computed = bench.runner.launch([Row(resident, 0, len(prompt), is_sampled=True)]).wait()
    scores = [*computed.prompt_scores[0].scores, *computed.sampled_scores[0].scores]
    expected = logits.log_softmax(dim=-1).to("cpu")  # One wait, of a check.
    own = expected[torch.arange(len(prompt)), torch.tensor([*prompt[1:], *computed.token_ids])]
    likeliest = expected.topk(MAX_TOP, dim=1).values
    theirs = torch.cat([own.unsqueeze(1), likeliest], dim=1)  # (tokens, 1 + MAX_TOP)
    mine = torch.tensor([[logprob, *(value for _, value in top)] for logprob, top in scores])
    return relative_error(mine, theirs)


def blocks_of(bench: Bench, num_tokens: int) -> range:
    """Return where the check's own request lies, the same for all of its runs."""
    return range(3, 3 + -(-num_tokens // bench.limits.block_size))


def prefilled(bench: Bench, runner: CudaRunner, prompt: list[int], chunk_len: int, num_neighbours: int = 0) -> Tensor:
    """Return the logits after a prompt that is computed in chunks, beside other streams' decodes."""
    blocks = blocks_of(bench, len(prompt))
    resident = resident_of(0, prompt, blocks)
    free = blocks[-1] + 1
    num_neighbours = min(num_neighbours, MAX_NEIGHBOURS, bench.limits.max_num_slots - 1)
    neighbours = [bench.row(1 + index, 5 + index, 1, free + index) for index in range(num_neighbours)]
    for start in range(0, len(prompt), chunk_len):
        end = min(start + chunk_len, len(prompt))
        is_last = end == len(prompt)
        logits = runner.logits([*neighbours, Row(resident, start, end - start, is_sampled=is_last)])
    return logits[-1]


def forced(bench: Bench, runner: CudaRunner, tokens: list[int], prompt_len: int) -> Tensor:
    """Return the logits after each token from prompt_len on, each computed as a decode: (decodes, vocab)."""
    blocks = blocks_of(bench, len(tokens))
    prefilled(bench, runner, tokens[:prompt_len], prompt_len)
    resident = resident_of(0, tokens, blocks)
    return torch.cat([runner.logits([Row(resident, at, 1, is_sampled=True)]) for at in range(prompt_len, len(tokens))])
