"""Sampling: greedy ties, distributions, candidates, and a token that depends on its own row alone."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peg.errors import RankError
from peg.kernels.candidates import Filters, smallest_logits
from peg.kernels.gumbel import gumbel, noise_key
from peg.models.comm import Communicator
from peg.plan import SamplingParams
from peg.ranks.device import CpuDevice
from peg.ranks.sampling import Draw, Sampler, read_tokens
from tests.unit.rank_threads import on_ranks, shard

GREEDY = SamplingParams(temperature=0)
INF = float("inf")


def sample(logits: Tensor, draws: Sequence[Draw], world_size: int = 1, forbidden: Sequence[int] = ()) -> list[int]:
    """The tokens that every rank agrees on."""

    def work(comm: Communicator) -> list[int]:
        mine = shard(logits, world_size, comm.rank)
        before = mine.clone()
        sampler = Sampler(comm.rank * mine.shape[1], mine.shape[1], forbidden, CpuDevice(world_size))
        sampler.prepare()
        ids = list(read_tokens(sampler.sample(mine, draws, comm)))
        assert torch.equal(mine, before), "logits were changed"
        return ids

    results = on_ranks(world_size, work)
    assert all(result == results[0] for result in results)
    return results[0]


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    """How many standard deviations the chi-square statistic of these counts is above its mean."""
    used = probabilities > 0
    assert not counts[~used].any(), "a token without probability was sampled"
    expected = probabilities[used] * counts.sum()
    statistic = float(((counts[used] - expected) ** 2 / expected).sum())
    freedom = int(used.sum()) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


def distribution(logits: Tensor, params: SamplingParams, samples: int = 4000, world_size: int = 1) -> Tensor:
    """How often each token came, over that many positions of one sequence."""
    counts = torch.zeros(logits.numel())
    batch = 500
    for first in range(0, samples, batch):
        draws = [Draw(params, first + index) for index in range(batch)]
        for token in sample(logits.expand(batch, -1), draws, world_size):
            counts[token] += 1
    return counts


# --- greedy -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 9])
def test_greedy_takes_the_lowest_id_among_equals(world_size: int) -> None:
    """Ties go to the lowest id, inside a shard and between shards, −0 being 0."""
    logits = torch.zeros(4, 50)
    logits[0, [7, 8, 31, 49]] = 2.0
    logits[1, [49]] = 1.0
    logits[2, 0] = -0.0
    logits[3] = -1.0
    logits[3, [20, 40]] = -0.5
    assert sample(logits, [Draw(GREEDY, 0)] * 4, world_size) == [7, 49, 0, 20]


def test_greedy_is_what_a_temperature_near_zero_means() -> None:
    """A temperature that fp32 cannot tell from none is greedy, and does not overflow."""
    logits = torch.tensor([[1.0, 30.0, 30.0, -50.0]])
    for temperature in (0.0, 1e-30, 9e-6):
        assert sample(logits, [Draw(SamplingParams(temperature=temperature), 0)]) == [1]


@pytest.mark.parametrize("world_size", [1, 3])
def test_forbidden_ids_are_never_sampled(world_size: int) -> None:
    """Neither greedily nor by chance, however likely they are; the logits themselves stay as they are."""
    logits = torch.zeros(2, 12)
    logits[:, [3, 11]] = 20.0
    logits[:, 5] = 1.0
    draws = [Draw(GREEDY, 0), Draw(SamplingParams(top_p=0.9), 0)]
    for position in range(20):
        draws[1] = replace(draws[1], position=position)
        tokens = sample(logits, draws, world_size, forbidden=(3, 11))
        assert tokens[0] == 5
        assert tokens[1] not in {3, 11}


@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), INF, -INF])
@pytest.mark.parametrize("world_size", [1, 3])
def test_logits_that_are_not_finite_are_refused(bad: float, world_size: int) -> None:
    """A row whose largest logit is not a number raises on every rank, also where only one rank sees it."""
    logits = torch.zeros(2, 9)
    logits[1] = bad if bad == -INF else logits[1].index_fill(0, torch.tensor([8]), bad)
    with pytest.raises(RankError, match="row 1 of the batch"):
        sample(logits, [Draw(GREEDY, 0)] * 2, world_size)


# --- noise ------------------------------------------------------------------------------------------------


def test_noise_is_gumbel_noise() -> None:
    """Mean, variance and quantiles of a million numbers are those of the Gumbel distribution; the tail is there."""
    ids = torch.arange(50_000, dtype=torch.int32)
    noise = torch.stack([gumbel(ids, noise_key(seed, 11)) for seed in range(20)]).double()
    assert noise.isfinite().all()
    assert abs(float(noise.mean()) - 0.5772156649) < 0.005
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.02
    for quantile in (0.001, 0.1, 0.5, 0.9, 0.999, 0.99999):
        share = float((noise < -math.log(-math.log(quantile))).double().mean())
        assert abs(share - quantile) < 5 * math.sqrt(quantile * (1 - quantile) / noise.numel()), quantile


def test_noise_of_neighbours_is_independent() -> None:
    """Tokens, positions and seeds that are close by have uncorrelated noise."""
    ids = torch.arange(100_000, dtype=torch.int32)
    first, second = noise_key(5, 100)
    base = gumbel(ids, (first, second))
    others = [noise_key(5, 101), noise_key(6, 100), noise_key(5 + (1 << 32), 100), noise_key(4, 101)]
    others += [(first ^ 1, second + 1), (first ^ 0xFFFF, second ^ 0xFFFF), (second, first)]
    for row in (base.roll(1), base.roll(16), *(gumbel(ids, key) for key in others)):
        assert abs(float(torch.corrcoef(torch.stack((base, row)))[0, 1])) < 0.015


def test_noise_has_known_bits() -> None:
    """The integers are those of lowbias32, step by step in plain Python; nothing may change them unseen."""

    def mix(value: int, between: int = 0) -> int:
        value ^= value >> 16
        value = value * 0x7FEB352D % 2**32 ^ between
        value ^= value >> 15
        value = value * 0x846CA68B % 2**32
        return value ^ value >> 16

    seed, position = 0x123456789ABCDEF0, 77
    keys = []
    for key in (0x9E3779B9, 0x85EBCA6B):
        for word in (seed % 2**32, seed >> 32, position):
            key = mix(key ^ word)  # noqa: PLW2901
        keys.append(key)
    assert noise_key(seed, position) == tuple(keys)
    noise = gumbel(torch.arange(200, dtype=torch.int32), noise_key(seed, position))
    for token in range(200):
        uniform = ((mix(token ^ keys[0], keys[1]) >> 1) + 0.5) * 2.0**-31
        assert math.isclose(float(noise[token]), -math.log(-math.log1p(-uniform)), rel_tol=1e-5, abs_tol=1e-5)


# --- distributions ----------------------------------------------------------------------------------------

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, -4.0, 1.5, 0.9, -0.1])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_gives_the_softmax(temperature: float) -> None:
    """4000 draws follow softmax(logits / temperature)."""
    counts = distribution(LOGITS, SamplingParams(temperature=temperature, seed=3))
    assert abs(chi_square(counts, (LOGITS.double() / temperature).softmax(0))) < 4


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(top_k=3), [0, 8, 1]),
        (SamplingParams(top_k=1, temperature=5.0), [0]),
        (SamplingParams(top_p=0.6), [0, 8, 1]),
        (SamplingParams(min_p=0.3), [0, 8, 1, 9]),
        (SamplingParams(top_k=4, top_p=0.75), [0, 8, 1]),
        (SamplingParams(top_k=11, top_p=0.9999999, min_p=0.0), list(range(11))),
    ],
)
def test_candidates_are_renormalised(params: SamplingParams, kept: list[int]) -> None:
    """Draws follow the softmax over the tokens that the parameters keep, over two ranks."""
    probabilities = torch.zeros(LOGITS.numel(), dtype=torch.float64)
    probabilities[kept] = (LOGITS[kept].double() / params.temperature).softmax(0)
    counts = distribution(LOGITS, params, samples=2000, world_size=2)
    if len(kept) == 1:
        assert counts[kept[0]] == counts.sum()
    else:
        assert abs(chi_square(counts, probabilities)) < 4


# --- candidates -------------------------------------------------------------------------------------------


def smallest_logit(logits: Tensor, params: SamplingParams) -> float:
    exact = torch.tensor([[params.temperature], [params.top_p], [params.min_p]], dtype=torch.float64)
    return float(smallest_logits(logits[None], Filters(exact[0], torch.tensor([params.top_k]), exact[1], exact[2]))[0])


def kept_by_sorting(logits: Tensor, params: SamplingParams) -> list[int]:
    """The rule of `smallest_logit` written down plainly: sort everything, in fp64."""
    values = logits.double()
    kept = (
        values >= values.max() + params.temperature * math.log(params.min_p)
        if params.min_p
        else torch.ones_like(values, dtype=torch.bool)
    )
    if params.top_k:
        kept &= values >= values.sort(descending=True).values[min(params.top_k, values.numel()) - 1]
    if params.top_p < 1:
        weights = torch.where(kept, (values / params.temperature).softmax(0), 0.0)
        order = values.argsort(descending=True, stable=True)
        reached = weights[order].cumsum(0) >= params.top_p * weights.sum()
        last = int(reached.nonzero()[0]) if reached.any() else values.numel() - 1
        kept &= values >= values[order[last]]
    return kept.nonzero().flatten().tolist()


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from([5, 40, 3000, 20_000]),
    st.sampled_from([0, 1, 2, 30, 300, 100_000]),
    st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    st.sampled_from([0.0, 0.001, 0.2, 1.0]),
    st.sampled_from([0.2, 1.0, 3.0]),
)
def test_candidates_are_those_that_sorting_finds(
    seed: int, vocab: int, top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    """Without sorting the vocabulary, the same tokens are kept, for flat and steep rows and with ties."""
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * (1 + seed % 5)
    if seed % 3 == 0:
        logits = (logits * 4).round() / 4
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    floor = smallest_logit(logits, params)
    assert (logits >= floor).nonzero().flatten().tolist() == kept_by_sorting(logits, params)


def test_a_tie_with_the_last_candidate_is_a_candidate() -> None:
    """top_k = 2 of three equal logits keeps all three; a lower one goes."""
    logits = torch.tensor([1.0, 3.0, 3.0, 3.0])
    assert smallest_logit(logits, SamplingParams(top_k=2)) == 3.0


def test_what_cannot_be_sampled_counts_for_nothing() -> None:
    """−inf entries, such as the vocabulary's padding, are in no nucleus."""
    logits = torch.tensor([1.0, -INF, 0.0, -INF, -1.0])
    assert smallest_logit(logits, SamplingParams(top_p=0.9)) == 0.0
    assert smallest_logit(logits, SamplingParams(top_k=4)) == -INF
    assert sample(logits[None], [Draw(SamplingParams(top_k=4, top_p=0.9999), 1)])[0] in {0, 2, 4}


# --- purity -----------------------------------------------------------------------------------------------


def random_draws(rows: int, seed: int) -> list[Draw]:
    chooser = random.Random(seed)
    return [
        Draw(
            SamplingParams(
                temperature=chooser.choice([0.0, 0.7, 1.0, 1.5]),
                top_k=chooser.choice([0, 0, 5, 40]),
                top_p=chooser.choice([1.0, 0.95, 0.5]),
                min_p=chooser.choice([0.0, 0.0, 0.1]),
                seed=chooser.getrandbits(64),
            ),
            chooser.randrange(4000),
        )
        for _ in range(rows)
    ]


@pytest.mark.parametrize("world_size", [1, 3, 9])
def test_a_token_depends_on_its_row_alone(world_size: int) -> None:
    """A row gets the same token alone, in a batch, in a shuffled batch, and at every world size."""
    vocab, rows = 4099, 24
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1)) * 3
    draws = random_draws(rows, 2)
    alone = [sample(logits[row : row + 1], [draws[row]])[0] for row in range(rows)]
    assert sample(logits, draws, world_size) == alone
    order = random.Random(3).sample(range(rows), rows)
    assert sample(logits[order], [draws[row] for row in order], world_size) == [alone[row] for row in order]


def test_seed_and_position_change_the_token() -> None:
    """Other seeds and other positions draw other tokens, 64-bit seeds in full."""
    logits = torch.zeros(1, 5000)
    draws = [Draw(SamplingParams(seed=seed), position) for seed in (1, 2, 1 << 40) for position in (7, 8)]
    tokens = [sample(logits, [draw])[0] for draw in draws]
    assert len(set(tokens)) == len(tokens)
