"""Drawing tokens: greedy, the race, its filters, and what it must not depend on."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.messages.requests import Sampling
from gpu_worker.sampler import Draw, noise, sample

VOCAB_SIZE = 50
EOS = (3, 4)


def logits_of(num_rows: int, *, vocab_size: int = VOCAB_SIZE, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2


def draw(*, seed: int = 0, position: int = 10, num_prompt_tokens: int = 5, **sampling: Any) -> Draw:
    return Draw(Sampling(**sampling), seed, position, num_prompt_tokens)


def one(logits: Tensor, a_draw: Draw, eos_token_ids: tuple[int, ...] = EOS) -> int:
    return int(sample(logits.clone().unsqueeze(0), [a_draw], eos_token_ids))


def many(logits: Tensor, num_draws: int, **sampling: Any) -> Counter[int]:
    """Return how often each token came, over seeds."""
    draws = [draw(seed=seed, **sampling) for seed in range(num_draws)]
    return Counter(sample(logits.repeat(num_draws, 1), draws, EOS).tolist())


def kept_by(logits: Tensor, **sampling: Any) -> set[int]:
    """Return the tokens that ever come, at a temperature so high that whatever is kept does."""
    return set(many(logits, 1000, **sampling))


def test_temperature_0_and_top_k_1_are_greedy() -> None:
    logits = logits_of(20)
    best = logits.argmax(dim=-1).tolist()
    for sampling in ({"temperature": 0.0}, {"top_k": 1}, {"temperature": 1e-9, "top_p": 0.5}):
        draws = [draw(seed=row, **sampling) for row in range(20)]
        assert sample(logits.clone(), draws, EOS).tolist() == best


def test_of_tied_tokens_greedy_takes_the_first() -> None:
    logits = torch.zeros(VOCAB_SIZE)
    logits[[7, 30]] = 1.0
    for seed in range(10):
        assert one(logits, draw(seed=seed, top_k=1)) == one(logits, draw(seed=seed, temperature=0.0)) == 7


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_the_softmax_says(temperature: float) -> None:
    num_draws = 5_000
    logits = logits_of(1)[0]
    counts = many(logits, num_draws, temperature=temperature)
    expected = (logits / temperature).softmax(dim=-1) * num_draws
    # Rare tokens share one cell, or their tiny expectations would rule the sum.
    is_rare = expected < 10
    chi_square = sum((counts[i] - float(expected[i])) ** 2 / float(expected[i]) for i in range(50) if not is_rare[i])
    num_cells = int((~is_rare).sum())
    # The seeds are fixed, so this is no matter of luck: mean num_cells, standard deviation sqrt(2 num_cells).
    assert chi_square < num_cells + 4 * math.sqrt(2 * num_cells)


def test_positions_are_as_good_as_seeds() -> None:
    logits = torch.zeros(8)
    draws = [draw(seed=1, position=position) for position in range(4000)]
    counts = Counter(sample(logits.repeat(4000, 1), draws, EOS).tolist())
    assert sum((counts[token] - 500) ** 2 / 500 for token in range(8)) < 8 + 4 * math.sqrt(16)


def test_noise_is_gumbel_distributed() -> None:
    drawn = noise(5, 6, torch.arange(100_000))
    assert float(drawn.mean()) == pytest.approx(0.5772, abs=0.02)
    assert float(drawn.std()) == pytest.approx(math.pi / math.sqrt(6), abs=0.02)
    assert drawn.isfinite().all()


def test_noise_is_the_hash_that_it_was() -> None:
    # Streams continue on other workers and later versions: a change here changes every seeded output.
    token_ids = torch.tensor([0, 1, 49151])
    assert noise(0, 0, token_ids).tolist() == pytest.approx([1.4826748, 0.8853519, 0.4843860], abs=1e-6)
    assert noise(-(2**63), 131071, token_ids).tolist() == pytest.approx([-1.5749741, -1.0706769, -0.6117689], abs=1e-6)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(-(2**63), 2**63 - 1), position=st.integers(0, 2**31), token_id=st.integers(0, 2**20))
def test_noise_equals_the_same_hash_in_plain_integers(seed: int, position: int, token_id: int) -> None:
    word = (1 << 64) - 1

    def mixed(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & word
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & word
        return x ^ (x >> 31)

    key = mixed((mixed((seed + 0x9E3779B97F4A7C15) & word) + position) & word)
    bits = mixed((key + token_id * 0x9E3779B97F4A7C15) & word)
    uniform = ((bits >> 11) + 0.5) / 2**53
    expected = -math.log(-math.log1p(-uniform)) if uniform < 1 else -math.inf
    assert float(noise(seed, position, torch.tensor([token_id]))) == pytest.approx(expected, rel=1e-4, abs=1e-4)


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(1, 2**31),
    neighbours=st.lists(st.sampled_from([0.0, 0.7, 1.0]), max_size=4),
    place=st.integers(0, 4),
    top_p=st.sampled_from([1.0, 0.9]),
)
def test_a_draw_does_not_depend_on_its_neighbours(
    seed: int, position: int, neighbours: list[float], place: int, top_p: float
) -> None:
    mine = draw(seed=seed, position=position, top_p=top_p)
    place = min(place, len(neighbours))
    draws = [draw(seed=seed + 1 if seed < 0 else seed - 1, temperature=temperature) for temperature in neighbours]
    draws.insert(place, mine)
    logits = logits_of(len(draws), seed=len(neighbours))
    together = sample(logits.clone(), draws, EOS)
    assert int(together[place]) == one(logits[place], mine)


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(-(2**63), 2**63 - 1), top_k=st.integers(2, 60), top_p=st.floats(0.05, 1.0), min_p=st.floats(0, 0.5)
)
def test_a_token_that_wins_without_filters_wins_with_any_that_keep_it(
    seed: int, top_k: int, top_p: float, min_p: float
) -> None:
    logits = logits_of(1)[0]
    free = one(logits, draw(seed=seed))
    filters: dict[str, Any] = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    if free in reference_kept(logits, 1.0, **filters):
        assert one(logits, draw(seed=seed, **filters)) == free


def reference_kept(
    logits: Tensor, temperature: float, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> set[int]:
    """The filters as their papers put them: sort, cut, renormalise, sum."""
    order = sorted(range(len(logits)), key=lambda token: -float(logits[token]))
    order = order[:top_k] if top_k else order
    weights = {token: math.exp(float(logits[token]) / temperature) for token in order}
    total, mass = sum(weights.values()), 0.0
    nucleus = []
    for token in order:
        if mass >= top_p:
            break
        nucleus.append(token)
        mass += weights[token] / total
    best = weights[order[0]]
    return {token for token in nucleus if weights[token] >= min_p * best}


@pytest.mark.parametrize(
    "filters",
    [{"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.3}, {"top_k": 9, "top_p": 0.7}, {"top_p": 0.9, "min_p": 0.4}],
    ids=str,
)
def test_filters_keep_exactly_what_they_should(filters: dict[str, Any]) -> None:
    logits = logits_of(1, vocab_size=20)[0] * 0.3
    assert kept_by(logits, temperature=1.0, **filters) == reference_kept(logits, 1.0, **filters)


def test_top_p_looks_past_its_first_candidates_when_the_mass_lies_wide() -> None:
    logits = torch.linspace(0.001, 0, 5000)  # near uniform: half the mass is half the tokens
    tokens = set(many(logits, 800, top_p=0.5))
    assert max(tokens) < 2502
    assert max(tokens) > 2400


def test_tokens_tied_with_the_last_one_kept_are_kept_too() -> None:
    logits = torch.tensor([2.0, 1.0, 1.0, 0.0])
    assert kept_by(logits, top_k=2, temperature=5.0) == {0, 1, 2}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_end_comes_before_min_tokens(temperature: float) -> None:
    logits = torch.zeros(VOCAB_SIZE)
    logits[[3, 4, 9]] = 50.0  # both end-of-sequence ids, and a stop id of the request
    settings = {"temperature": temperature, "min_tokens": 6, "stop_token_ids": (9,)}
    for position in range(5, 12):  # the 1st output token is at 5
        tokens = {one(logits, draw(seed=seed, position=position, num_prompt_tokens=5, **settings)) for seed in range(5)}
        assert (tokens <= {3, 4, 9}) is (position >= 11)


def test_min_tokens_bars_the_end_also_where_eos_is_ignored() -> None:
    logits = torch.zeros(VOCAB_SIZE)
    logits[3] = 50.0
    assert one(logits, draw(temperature=0.0, ignore_eos=True)) == 3
    assert one(logits, draw(temperature=0.0, ignore_eos=True, min_tokens=6)) != 3


def test_a_stop_id_outside_the_vocabulary_bars_nothing() -> None:
    logits = logits_of(1)[0]
    best = int(logits.argmax())
    for stop_id in (VOCAB_SIZE, -1, -VOCAB_SIZE + best):
        assert one(logits, draw(temperature=0.0, min_tokens=6, stop_token_ids=(stop_id,)), eos_token_ids=()) == best


def test_bfloat16_logits_are_drawn_from_in_float32() -> None:
    logits = logits_of(1)[0].bfloat16()
    assert one(logits, draw(seed=4, top_p=0.9)) == one(logits.float(), draw(seed=4, top_p=0.9))
