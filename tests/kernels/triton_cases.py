"""What every Triton kernel must do, written once: run in the interpreter on a CPU, and compiled on a card.

A case makes its inputs on the CPU, asks the reference there, and runs the kernel on its site. Sizes are odd, rows may
lie apart, and what lies outside of them, or has not been written yet, is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol
from unittest import mock

import torch
from torch import Tensor

from peg.kernels import activation, attention, embedding, heads, mailbox, norm, rope, sampling
from peg.kernels.gumbel import noise_key
from peg.kernels.mailbox import DecodeColumns, Mailbox, RowState

MODULES = (activation, attention, embedding, heads, mailbox, norm, sampling)
NAN = float("nan")


@dataclass(frozen=True)
class Site:
    """Where kernels run: on a card, or in the interpreter on a CPU."""

    device: torch.device
    dtype: torch.dtype

    @contextmanager
    def kernels(self) -> Iterator[None]:
        """Public functions take their Triton path here, whatever the device, and new memory is poisoned."""
        empty = torch.empty

        def poisoned(*size: Any, **options: Any) -> Tensor:
            made: Tensor = empty(*size, **options)
            return made.fill_(NAN) if made.is_floating_point() else made

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(torch, "empty", poisoned))
            for module in MODULES:
                stack.enter_context(mock.patch.object(module, "on_cpu", return_value=False))
            yield

    def random(self, seed: int, *shape: int) -> Tensor:
        """Normal numbers of this site's dtype, on the CPU."""
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(self.dtype)

    def put(self, tensor: Tensor) -> Tensor:
        """Copy over, with more NaN behind every row than rows are long."""
        rows = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1] + 3), NAN).to(tensor.dtype)
        rows[..., : tensor.shape[-1]] = tensor
        return rows.to(self.device)[..., : tensor.shape[-1]]

    def check(self, out: Tensor, expected: Tensor, roundings: float = 2, absolute: float = 1e-6) -> None:
        """Both sides finite; then every element within absolute + roundings · (half a unit in the last place)."""
        out, expected = out.detach().cpu().double(), expected.double()
        assert out.shape == expected.shape, (out.shape, expected.shape)
        assert expected.isfinite().all(), "the reference is not finite"
        assert out.isfinite().all(), f"{int((~out.isfinite()).sum())} of {out.numel()} elements are not finite"
        excess = (out - expected).abs() - roundings * torch.finfo(self.dtype).eps * expected.abs()
        worst = int(excess.argmax())
        assert excess.max() <= absolute, f"element {worst}: {out.flatten()[worst]} for {expected.flatten()[worst]}"


class Case(Protocol):
    def __call__(self, site: Site) -> None: ...


def norm_of_heads(site: Site) -> None:
    x = site.random(0, 5, 9, 24)
    weight, weight_fp32 = site.random(1, 24), site.random(2, 24).float()
    there = site.put(x.flatten(1)).unflatten(1, (9, 24))[:, 2:]
    with site.kernels():
        outs = (
            norm.rms_norm(there, weight.to(site.device), 1e-5),
            norm.rms_norm_fp32(there, weight_fp32.to(site.device), 1e-5),
        )
    x = x[:, 2:]
    rounded_twice = norm.rms_norm(x, weight, 1e-5)
    site.check(outs[0], rounded_twice)
    if site.dtype != torch.float32:  # rounding once instead would change every fourth element
        assert (outs[0].cpu() == rounded_twice).float().mean() > 0.95
    site.check(outs[1], norm.rms_norm_fp32(x, weight_fp32, 1e-5))


def norm_with_residual(site: Site) -> None:
    x, residual, weight = site.random(0, 3, 2100), site.random(1, 3, 2100), site.random(2, 2100)
    there, stream = site.put(x), site.put(residual)
    with site.kernels():
        out = norm.add_rms_norm_(there, stream, weight.to(site.device), 1e-6)
    expected = norm.add_rms_norm_(x, residual, weight, 1e-6)
    site.check(stream, residual, roundings=1)
    site.check(out, expected, roundings=3)


def norm_then_add(site: Site) -> None:
    x, residual, weight = site.random(0, 3, 576), site.random(1, 3, 576), site.random(2, 576).float()
    there, stream = site.put(x), site.put(residual)
    with site.kernels():
        norm.rms_norm_add_(there, stream, weight.to(site.device), 1e-6)
    norm.rms_norm_add_(x, residual, weight, 1e-6)
    site.check(stream, residual, absolute=8 * torch.finfo(site.dtype).eps)


def norm_then_add_then_norm(site: Site) -> None:
    """With a factor in between and without; the residual that was rounded last is what is normalised."""
    for scale in (None, torch.tensor([0.37]).to(site.dtype)):
        x, residual = site.random(0, 3, 1100), 9 * site.random(1, 3, 1100)
        weight, next_weight = site.random(2, 1100).float(), site.random(3, 1100)
        there, stream = site.put(x), site.put(residual)
        with site.kernels():
            factor = None if scale is None else scale.to(site.device)
            weights = (weight.to(site.device), next_weight.to(site.device))
            out = norm.rms_norm_add_rms_norm_(there, stream, *weights, 1e-2, factor)
        expected = norm.rms_norm_add_rms_norm_(x, residual, weight, next_weight, 1e-2, scale)
        for result, wanted in ((stream, residual), (out, expected)):
            site.check(result, wanted, absolute=8 * torch.finfo(site.dtype).eps)
            if site.dtype != torch.float32:  # a rounding less changes every eighth element
                assert (result.cpu() == wanted).float().mean() > 0.95


def gated_activations(site: Site) -> None:
    gate_up = 3 * site.random(0, 5, 2 * 1300)
    for function in (activation.silu_and_mul, activation.gelu_tanh_and_mul):
        with site.kernels():
            out = function(gate_up.to(site.device))
        site.check(out, function(gate_up), roundings=3)


def embedding_of_one_shard(site: Site) -> None:
    weight, ids = site.random(0, 100, 1100), torch.tensor([0, 50, 99, 149, 150, 300, 49])
    with site.kernels():
        out = embedding.embed(ids.to(site.device), weight.to(site.device), 50)
    assert torch.equal(out.cpu(), embedding.embed(ids, weight, 50))


@dataclass(frozen=True)
class Heads:
    """Q's and KV's heads of five tokens, V's too if `parts` is 3; without KV, Q alone. Slots are out of order."""

    queries: int
    kv_heads: int
    dim: int
    norm: Callable[[Tensor, Tensor, float], Tensor] | None = None
    weights: torch.dtype | None = None
    parts: int = 3
    norm_values: bool = False

    def __call__(self, site: Site) -> None:
        x = 3 * site.random(0, 5, self.queries + (self.parts - 1) * self.kv_heads, self.dim)
        x[2, :, ::2] *= 0.01
        frequencies = rope.default_frequencies(self.dim, 1e4)
        angles = rope.rope_angles(torch.tensor([0, 1, 5, 9000, 7]), frequencies, site.dtype)
        for each, low, high in zip(angles, (0.5, -0.5), (0.5, 0.5), strict=True):
            each[0] = torch.tensor([low, high]).repeat_interleave(self.dim // 2)  # exact: the reference rounds x · cos
        there = site.put(x.flatten(1)).unflatten(1, x.shape[1:])
        expected = self.run(x, angles, site.dtype, torch.device("cpu"))
        with site.kernels():
            results = self.run(there, angles, site.dtype, site.device)
        for result, wanted in zip(results, expected, strict=True):
            site.check(result, wanted, roundings=3, absolute=16 * torch.finfo(site.dtype).eps)
            if site.dtype != torch.float32:  # rounding elsewhere would change more of the first token
                assert (result[0].cpu() == wanted[0]).float().mean() > 0.95

    def run(self, x: Tensor, angles: heads.Angles, dtype: torch.dtype, place: torch.device) -> tuple[Tensor, ...]:
        """Q, and both pools, which have sevens where nothing was stored."""
        weights: list[Tensor | None] = [None, None]
        if self.norm is not None:
            dice = torch.Generator().manual_seed(1)
            weights = [torch.randn(self.dim, generator=dice).to(self.weights or dtype).to(place) for _ in "qk"]
        k_norm = weights[1] if self.kv_heads else None
        rules = heads.HeadRules(self.queries, self.norm, weights[0], k_norm, 1e-2, self.norm_values)
        cos, sin = (each.to(place) for each in angles)
        if not self.kv_heads:
            return (heads.turn_queries(x, rules, (cos, sin)),)
        k, v = (torch.full((4, 16, self.kv_heads, self.dim), 7.0, dtype=dtype, device=place) for _ in "kv")
        q = heads.store_heads(x, rules, (cos, sin), k, v, torch.tensor([0, 63, 1, 5, 33], device=place))
        return q, k.flatten(0, 1), v.flatten(0, 1)


def turns_of_a_mailbox(site: Site) -> None:
    """Three turns of three rows out of five; two groups in blocks of four tokens."""
    dice = torch.Generator().manual_seed(0)
    inbox = torch.randint(0, 1 << 30, (2, mailbox.FIRST_SLOT + 2, 5), generator=dice)
    inbox[:, mailbox.POSITION].remainder_(24)
    inbox[:, mailbox.ROW] = torch.tensor([[4, 0, 2, 6, 6], [1, 3, 5, 6, 6]])
    inbox[:, mailbox.TOKEN, 1] = -1
    keys = torch.randint(-(1 << 60), 1 << 60, (3,), generator=dice)
    pins = site.device.type == "cuda"

    def run(place: torch.device) -> list[Tensor]:
        here, there = inbox.clone(), torch.zeros(2, 5, dtype=torch.int64)
        if pins:
            here, there = here.pin_memory(), there.pin_memory()
        box = Mailbox(here, there, torch.zeros(1, dtype=torch.int32, device=place))
        state = RowState(torch.arange(7).to(place), torch.zeros(2, 7, 6, dtype=torch.int32, device=place))
        kinds = (torch.int64, torch.int64, torch.int64, torch.int32, torch.float32)
        places = [torch.zeros(3, dtype=kind, device=place) for kind in kinds]
        noise, slots = (torch.zeros(*shape, dtype=torch.int64, device=place) for shape in ((3, 2), (2, 3)))
        ids, positions, rows, lens, temperatures = places
        columns = DecodeColumns(ids, positions, rows, lens, temperatures, noise, slots)
        kept = []
        for turn in range(3):
            mailbox.take_in(box, state, columns, 4)
            mailbox.hand_out(box, state, columns.rows, None if turn == 1 else keys.to(place))
            kept += [t.cpu().clone() for t in (*places, noise, slots, *vars_of(state), box.turn)]
        if place.type == "cuda":
            torch.cuda.synchronize()
        return [*kept, box.outbox.clone()]

    expected = run(torch.device("cpu"))
    with site.kernels():
        found = run(site.device)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def choice_of_tokens(site: Site) -> None:
    """Greedy and sampled rows over a vocabulary of more than a block, with floors and forbidden tokens and without."""
    rows, vocab = 4, 5003
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1))
    forbidden = torch.zeros(vocab, dtype=torch.bool)
    forbidden[4990:] = True
    forbidden[logits.argmax(1)] = True
    temperatures = torch.tensor([0.0, 1.0, 0.0, 0.7])
    noise = torch.tensor([noise_key(seed, 9) for seed in range(rows)])
    floors = torch.tensor([0.0, 1.0, float("-inf"), 2.0])
    for floor, mask in ((None, None), (floors, None), (None, forbidden), (floors, forbidden)):
        choice = sampling.Choice(temperatures, noise, floor, mask)
        expected = sampling.best_keys(logits, choice, 70)
        there = [None if each is None else each.to(site.device) for each in (temperatures, noise, floor, mask)]
        with site.kernels():
            keys = sampling.best_keys(logits.to(site.device), sampling.Choice(*there), 70)  # type: ignore[arg-type]
        assert keys.cpu().tolist() == expected.tolist()


def vars_of(state: RowState) -> tuple[Tensor, Tensor]:
    return state.last_tokens, state.tables


@dataclass(frozen=True)
class Attend:
    """Attention of slices of `queries` tokens at the end of `contexts` tokens; keys nobody may see are NaN."""

    heads: int
    kv_heads: int
    dim: int
    queries: tuple[int, ...]
    contexts: tuple[int, ...]
    window: int | None = None
    block: int = 16

    def __call__(self, site: Site) -> None:
        k_cache, v_cache, tables = self.pool(site)
        q = site.random(3, sum(self.queries), self.heads, self.dim)
        starts = torch.tensor([0, *accumulate(self.queries)], dtype=torch.int32)
        lengths = torch.tensor(self.contexts, dtype=torch.int32)
        out = self.attend(q, k_cache, v_cache, tables, starts, lengths, torch.device("cpu"), torch.float32)
        with site.kernels():
            result = self.attend(q, k_cache, v_cache, tables, starts, lengths, site.device, site.dtype)
        site.check(result, out, roundings=2, absolute=2 * torch.finfo(site.dtype).eps + 1e-5)

    def pool(self, site: Site) -> tuple[Tensor, Tensor, Tensor]:
        """Blocks in random order; table entries that are not read name a block that is not there."""
        needed = [-(-context // self.block) for context in self.contexts]
        order = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(1)) + 1
        k_cache, v_cache = (torch.full((sum(needed) + 1, self.block, self.kv_heads, self.dim), NAN) for _ in "kv")
        tables = torch.full((len(needed), max(needed) + 1), 1 << 30, dtype=torch.int32)
        for index, (count, blocks) in enumerate(zip(needed, order.split(needed), strict=True)):
            context, queries = self.contexts[index], self.queries[index]
            oldest = max(0, context - queries - self.window + 1) if self.window else 0
            skipped = oldest // self.block
            tables[index, skipped:count] = blocks[skipped:].int()
            slots = (blocks[:, None] * self.block + torch.arange(self.block)).flatten()[oldest:context]
            for seed, pool in ((10 + index, k_cache), (50 + index, v_cache)):
                pool.view(-1, self.kv_heads, self.dim)[slots] = site.random(
                    seed, context - oldest, self.kv_heads, self.dim
                ).float()
        return k_cache, v_cache, tables

    def attend(self, *tensors: Any) -> Tensor:
        *inputs, device, dtype = tensors
        q, k_cache, v_cache, tables, starts, lengths = (
            tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype) for tensor in inputs
        )
        layout = attention.SliceLayout(starts, lengths, self.queries, self.contexts)
        plan = attention.plan_attention(layout, tables, k_cache, self.window)
        return attention.paged_attention(q, k_cache, v_cache, plan, self.dim**-0.5)


CASES: Mapping[str, Case] = {
    "norm of heads": norm_of_heads,
    "norm with residual": norm_with_residual,
    "norm, then add": norm_then_add,
    "norm, then add, then norm": norm_then_add_then_norm,
    "gated activations": gated_activations,
    "embedding of one shard": embedding_of_one_shard,
    "heads": Heads(7, 1, 24),
    "heads, many": Heads(33, 11, 64),
    "heads, weight behind a rounding": Heads(9, 3, 24, norm.rms_norm),
    "heads, weight in fp32": Heads(4, 2, 136, norm.rms_norm_fp32, torch.float32),
    "heads, K is V too": Heads(6, 2, 48, norm.rms_norm_fp32, parts=2, norm_values=True),
    "heads, values normalised": Heads(2, 1, 600, norm.rms_norm_fp32, norm_values=True),
    "heads, queries alone": Heads(5, 0, 24, norm.rms_norm_fp32),
    "turns of a mailbox": turns_of_a_mailbox,
    "choice of tokens": choice_of_tokens,
    "decode": Attend(9, 3, 16, (1, 1, 1), (1, 17, 70)),
    "decode, split": Attend(6, 2, 64, (1, 1, 1), (1, 300, 700)),
    "decode, split, window": Attend(6, 2, 64, (1, 1, 1), (300, 150, 700), window=200),
    "decode, splits beside dead ones": Attend(6, 1, 300, (1, 1), (990, 20)),
    "decode, splits beside dead ones, window": Attend(2, 2, 136, (1, 1, 1), (300, 200, 1), window=171),
    "decode, window": Attend(8, 1, 32, (1, 1, 1), (1, 17, 70), window=5),
    "prefill": Attend(6, 2, 16, (17, 5, 33), (17, 9, 70)),
    "prefill, window": Attend(4, 2, 24, (40, 5, 64), (100, 17, 64), window=20, block=8),
    "mixed": Attend(16, 1, 16, (1, 5, 1, 37, 1), (90, 17, 70, 150, 1), window=33),
    "mixed, group of 3": Attend(9, 3, 16, (1, 20, 1, 9), (50, 20, 16, 60)),
}
