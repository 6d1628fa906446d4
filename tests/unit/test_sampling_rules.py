"""Bans, biases and penalties of rows: against the plain formulas, over shares, and whatever happens to the sequence."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from peg.errors import RankError
from peg.plan import NewRow, SamplingParams, Slice, StepPlan
from peg.ranks.device import CpuDevice
from peg.ranks.rows import SamplingRows
from peg.ranks.rules import Share, rules_of
from peg.ranks.sampling import Draw, Sampler, read_tokens
from peg.ranks.solo_comm import SoloComm
from tests.unit.tiny_group import GREEDY, tiny_group

INF = math.inf
VOCAB = 40
STOPS = (2, 17)
CPU = CpuDevice(1)


def by_the_book(logits: list[float], params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    """The rules as vLLM's documentation has them, one token after the other."""
    shaped = list(logits)
    for token in range(len(logits)):
        banned = params.allowed_token_ids is not None and token not in params.allowed_token_ids
        for *beginning, last in params.bad_words:
            there = output[len(output) - len(beginning) :]
            banned |= token == last and there == beginning
        banned |= token in STOPS and len(output) < params.min_tokens
        value = -INF if banned else shaped[token]
        value += sum(amount for biased, amount in params.logit_bias if biased == token)
        if token in prompt or token in output:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.frequency_penalty * output.count(token)
        value -= params.presence_penalty * (token in output)
        shaped[token] = value
    return shaped


def random_params(chooser: random.Random) -> SamplingParams:
    """Some of the rules, over few ids so that they meet."""

    def word() -> tuple[int, ...]:
        return tuple(chooser.randrange(6) for _ in range(chooser.choice([1, 2, 2, 3, 4])))

    return SamplingParams(
        presence_penalty=chooser.choice([0.0, 0.5, -2.0]),
        frequency_penalty=chooser.choice([0.0, 0.3, -1.5]),
        repetition_penalty=chooser.choice([1.0, 1.3, 0.5]),
        logit_bias=chooser.choice([(), ((3, 1.5), (17, -100.0), (39, 100.0))]),
        min_tokens=chooser.choice([0, 3, 8]),
        allowed_token_ids=chooser.choice([None, frozenset(range(1, 30, 2))]),
        bad_words=tuple(word() for _ in range(chooser.choice([0, 1, 8]))),
    )


def new_row(params: SamplingParams, prompt: list[int], output: list[int]) -> NewRow:
    return NewRow(0, 0, params, tuple(prompt), tuple(output), (), STOPS if params.min_tokens else ())


def shares(world_size: int) -> list[Share]:
    size = -(-VOCAB // world_size)
    return [Share(rank * size, size) for rank in range(world_size)]


def part(logits: Tensor, share: Share) -> Tensor:
    """A rank's part of one row's logits, its padding −inf."""
    mine = torch.full((share.size,), -INF)
    there = logits[share.first_id : share.first_id + share.size]
    mine[: len(there)] = there
    return mine


@pytest.mark.parametrize("world_size", [1, 3, 9])
@pytest.mark.parametrize("seed", range(12))
def test_rules_are_those_of_the_book(world_size: int, seed: int) -> None:
    """For random rules, prompts and outputs every share's logits are what the formulas say, token after token."""
    chooser = random.Random(seed)
    params = random_params(chooser)
    prompt = [chooser.randrange(VOCAB) for _ in range(5)]
    output: list[int] = [chooser.randrange(6) for _ in range(chooser.choice([0, 4]))]
    rules = [rules_of(new_row(params, prompt, output), share, CPU) for share in shares(world_size)]
    for _ in range(14):
        logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(chooser.getrandbits(30))) * 4
        parts = [part(logits, share) for share in shares(world_size)]
        for mine, ruled in zip(parts, rules, strict=True):
            for rule in ruled:
                rule.apply_(mine)
        together = torch.cat(parts)
        wanted = torch.tensor(by_the_book(logits.tolist(), params, prompt, output))
        torch.testing.assert_close(together[:VOCAB], wanted, rtol=1e-5, atol=1e-5)
        assert (together[VOCAB:] == -INF).all(), "padding came alive"
        token = chooser.randrange(6) if chooser.random() < 0.9 else chooser.randrange(VOCAB)
        output.append(token)
        for ruled in rules:
            for rule in ruled:
                rule.sampled(torch.tensor(token))


@pytest.mark.parametrize("seed", range(12))
def test_a_row_that_comes_back_goes_on_as_before(seed: int) -> None:
    """Rules told of each token and rules made of all tokens at once give the same bits: nothing hangs on preemption."""
    chooser = random.Random(100 + seed)
    params, prompt, output = random_params(chooser), [chooser.randrange(VOCAB) for _ in range(7)], [1]
    share = Share(0, VOCAB)
    kept = rules_of(new_row(params, prompt, output), share, CPU)
    for _ in range(10):
        output.append(chooser.randrange(6))
        for rule in kept:
            rule.sampled(torch.tensor(output[-1]))
        logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(len(output)))
        one, other = logits.clone(), logits.clone()
        for rule in kept:
            rule.apply_(one)
        for rule in rules_of(new_row(params, prompt, output), share, CPU):
            rule.apply_(other)
        assert torch.equal(one, other)


def piece(row: int, mask: bytes | None = None) -> Slice:
    return Slice(row, row, 0, 1, (1,), samples=True, mask=mask)


def rows_with(*params: SamplingParams, share: Share | None = None) -> SamplingRows:
    rows = SamplingRows(len(params), share or Share(0, VOCAB), CPU)
    new = tuple(NewRow(row, row, wanted, (1, 2, 3), (), (), STOPS) for row, wanted in enumerate(params))
    rows.apply(StepPlan(0, 0, (), new_rows=new))
    return rows


def test_rows_without_rules_cost_nothing() -> None:
    """The logits go to the sampler as they are, the same tensor, however the row samples."""
    rows = rows_with(GREEDY, SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, logprobs=3))
    logits = torch.randn(2, VOCAB)
    assert rows.shape(logits, [piece(0), piece(1)]) is logits
    assert rows[0].rules == rows[1].rules == ()


def test_a_neighbour_and_the_logits_stay_as_they_are() -> None:
    """Only the row that has rules is changed, and only in a copy: logprobs are of the model's own logits."""
    rows = rows_with(GREEDY, replace(GREEDY, logit_bias=((5, 7.0),)), GREEDY)
    logits = torch.randn(3, VOCAB)
    before = logits.clone()
    shaped = rows.shape(logits, [piece(0), piece(1), piece(2)])
    assert torch.equal(logits, before)
    assert torch.equal(shaped[[0, 2]], before[[0, 2]])
    assert shaped[1, 5] == before[1, 5] + 7


@pytest.mark.parametrize("world_size", [1, 3, 7])
def test_a_mask_lets_its_own_bits_through(world_size: int) -> None:
    """Over every share, whose borders are no borders of bytes; ids past a short mask's end are out."""
    allowed = {0, 1, 7, 8, 13, 14, 20, 31, 33}
    mask = sum(1 << token for token in allowed).to_bytes(5, "little")
    for given, kept in ((mask, allowed), (mask[:2], {token for token in allowed if token < 16})):
        found = set()
        for share in shares(world_size):
            rows = rows_with(GREEDY, share=share)
            shaped = rows.shape(torch.zeros(1, share.size), [piece(0, given)])
            found |= {share.first_id + place for place in (shaped[0] == 0).nonzero().flatten().tolist()}
        assert found == kept


def sample(logits: Tensor, params: SamplingParams) -> int:
    return read_tokens(Sampler(0, VOCAB, (), CPU).sample(logits, [Draw(params, 4)], SoloComm(0)))[0]


@pytest.mark.parametrize("factor", [1e-300, 1e-30, 1e30, 1e300])
def test_no_factor_makes_a_logit_infinite(factor: float) -> None:
    """The wildest repetition penalty at the lowest temperature still leaves a token to choose, and breaks nothing."""
    params = SamplingParams(temperature=0.01, repetition_penalty=factor, allowed_token_ids=frozenset({1, 2}))
    for sign in (-1.0, 1.0):
        shaped = rows_with(params).shape(torch.full((1, VOCAB), sign * 3), [piece(0)])
        assert sample(shaped, params) in {1, 2}


@pytest.mark.parametrize("bad", [math.nan, INF])
def test_rules_do_not_hide_broken_logits(bad: float) -> None:
    """A logit that is no number is refused by the sampler, though a penalty went over it."""
    params = replace(GREEDY, repetition_penalty=1.5, logit_bias=((1, 2.0),))
    logits = torch.zeros(1, VOCAB)
    logits[0, 1] = bad
    shaped = rows_with(params).shape(logits, [piece(0)])
    with pytest.raises(RankError, match="not finite"):
        sample(shaped, params)


# --- the whole way: a group of ranks ------------------------------------------------------------------------

RULED = (
    replace(GREEDY, repetition_penalty=5.0),
    replace(GREEDY, presence_penalty=0.9, frequency_penalty=0.4),
    replace(GREEDY, logit_bias=((7, 3.0), (11, -100.0)), bad_words=((7, 7, 7), (30, 31), (4,))),
    SamplingParams(temperature=0.9, seed=5, frequency_penalty=1.0, allowed_token_ids=frozenset(range(3, 40, 3))),
    SamplingParams(temperature=1.1, seed=6, top_p=0.9, presence_penalty=-2.0),
)
PROMPTS = ((5, 6, 7, 8, 9), (11, 12, 13), (3, 4, 5, 3, 4, 5, 3, 4, 5), (20, 21, 22, 23), (41, 42))


def run(folder: Path, world_size: int, together: bool, **options: Any) -> list[list[int]]:
    """The tokens of each prompt under its own rules, all at once or one after the other."""
    with tiny_group(folder, world_size, **options) as tiny:
        if together:
            found = tiny.generate(PROMPTS, 12, RULED)[0]
            assert (tiny.preemptions > 0) == ("kv_cache_memory_bytes" in options)
            return found
        pairs = zip(PROMPTS, RULED, strict=True)
        return [tiny.generate([prompt], 12, params)[0][0] for prompt, params in pairs]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    return run(tmp_path_factory.mktemp("model"), 1, together=False)


def test_rules_change_what_is_said(tmp_path: Path, alone: list[list[int]]) -> None:
    """Each of the sequences that the tests below compare would be another one without its rules."""
    plain = [SamplingParams(temperature=each.temperature, seed=each.seed, top_p=each.top_p) for each in RULED]
    with tiny_group(tmp_path, 1) as tiny:
        without = tiny.generate(PROMPTS, 12, plain)[0]
    assert all(ruled != free for ruled, free in zip(alone, without, strict=True))


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (1, {}),
        (3, {}),
        (6, {"max_num_seqs": 5}),
        (1, {"max_num_batched_tokens": 5}),
        (3, {"max_num_batched_tokens": 7, "max_num_seqs": 3}),
        (1, {"max_num_seqs": 5, "max_model_len": 24, "kv_cache_memory_bytes": 24 * 768}),
    ],
    ids=str,
)
def test_ids_depend_on_their_own_sequence_alone(
    tmp_path: Path, alone: list[list[int]], world_size: int, options: dict[str, Any]
) -> None:
    """Batch mates, world size, chunks and preemption leave every id as it is when a sequence runs alone."""
    assert run(tmp_path, world_size, together=True, **options) == alone
