"""The references themselves: each against the formula in its docstring, in double precision and the slow way."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from peg.kernels.activation import gelu_tanh_and_mul, silu_and_mul
from peg.kernels.attention import SliceLayout, paged_attention, plan_attention
from peg.kernels.embedding import embed
from peg.kernels.linear import OneDnnLinear, PlainLinear, pack
from peg.kernels.norm import (
    add_rms_norm_,
    rms_norm,
    rms_norm_add_,
    rms_norm_add_rms_norm_,
    rms_norm_fp32,
    rms_normalize,
)
from peg.kernels.rope import apply_rope, default_frequencies, proportional_frequencies, rope_angles

NAN = float("nan")
HALF_ULP = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
DTYPES = list(HALF_ULP)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(out: Tensor, expected: Tensor, roundings: float, absolute: float = 1e-6) -> None:
    """Finite on both sides; then every element within absolute + roundings · (half a unit in the last place)."""
    assert out.isfinite().all()
    assert expected.isfinite().all()
    limit = absolute + roundings * HALF_ULP[out.dtype] * expected.double().abs()
    worst = ((out.double() - expected.double()).abs() - limit).max()
    assert worst <= 0, worst


# --- attention --------------------------------------------------------------------------------------------


class Pool:
    """A paged cache of NaN with some sequences stored in shuffled blocks, and their K and V as plain tensors."""

    def __init__(self, contexts: Sequence[int], heads: int, dim: int, block: int, dtype: torch.dtype) -> None:
        needed = sum(-(-context // block) for context in contexts)
        self.k_cache = torch.full((needed + 2, block, heads, dim), NAN).to(dtype)
        self.v_cache = self.k_cache.clone()
        ids = list(range(1, needed + 1))
        random.Random(0).shuffle(ids)
        self.tables = torch.full((len(contexts), max(contexts) // block + 3), needed + 1, dtype=torch.int32)
        self.k: list[Tensor] = []
        self.v: list[Tensor] = []
        for row, context in enumerate(contexts):
            blocks = [ids.pop() for _ in range(-(-context // block))]
            self.tables[row, : len(blocks)] = torch.tensor(blocks)
            slots = torch.tensor([blocks[i // block] * block + i % block for i in range(context)])
            k, v = (
                drawn(context, heads, dim, seed=row, dtype=dtype),
                drawn(context, heads, dim, seed=-1 - row, dtype=dtype),
            )
            self.k_cache.flatten(0, 1)[slots], self.v_cache.flatten(0, 1)[slots] = k, v
            self.k.append(k)
            self.v.append(v)

    def forget(self, row: int, position: int) -> None:
        """Poison one stored token."""
        block = self.k_cache.shape[1]
        place = (int(self.tables[row, position // block]), position % block)
        self.k_cache[place] = self.v_cache[place] = NAN


def attend_slowly(q: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float) -> Tensor:
    """Attention of the last len(q) tokens of one sequence, a query and a head at a time, in double precision."""
    queries, heads, _ = q.shape
    out = torch.empty(q.shape, dtype=torch.float64)
    for i in range(queries):
        position = len(k) - queries + i
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(heads):
            kv = head // (heads // k.shape[1])
            seen, values = k[first : position + 1, kv].double(), v[first : position + 1, kv].double()
            out[i, head] = torch.softmax(scale * (seen @ q[i, head].double()), 0) @ values
    return out


STEPS = {
    "one decode": ((1,), (37,)),
    "decodes": ((1, 1, 1, 1), (37, 1, 40, 9)),
    "equal decodes": ((1, 1), (21, 21)),
    "whole prompt": ((19,), (19,)),
    "chunk": ((7,), (30,)),
    "decodes far apart": ((1, 1, 1), (9, 600, 30)),
    "mixed": ((1, 1, 5, 1, 12, 1), (33, 2, 17, 8, 12, 40)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 6, 8, 100])
@pytest.mark.parametrize("step", STEPS)
def test_paged_attention(step: str, window: int | None, dtype: torch.dtype) -> None:
    """Any mixture of slices attends to exactly what lies in its window; all else in the pool is NaN."""
    queries, contexts = STEPS[step]
    pool = Pool(contexts, heads=2, dim=24, block=4, dtype=dtype)
    q = drawn(sum(queries), 6, 24, seed=99, dtype=dtype)
    for row, (count, context) in enumerate(zip(queries, contexts, strict=True)):
        for behind in range(context - count - window + 1 if window else 0):
            pool.forget(row, behind)
    starts = torch.tensor([0, *queries]).cumsum(0)
    layout = SliceLayout(starts.int(), torch.tensor(contexts).int(), queries, contexts)
    out = paged_attention(q, pool.k_cache, pool.v_cache, plan_attention(layout, pool.tables, pool.k_cache, window), 0.3)
    parts = zip(q.split(list(queries)), pool.k, pool.v, strict=True)
    expected = torch.cat([attend_slowly(part, k, v, window, 0.3) for part, k, v in parts])
    check(out, expected, roundings=3, absolute=1e-5 if dtype == torch.float32 else 2 * HALF_ULP[dtype])


def test_padding_never_doubles_the_work() -> None:
    """Decodes of very different contexts are not padded to the longest: at most twice their own keys are read."""
    contexts = tuple(random.Random(0).choices((1, 5, 40, 300, 5000), k=60))
    tables = torch.ones(len(contexts), 5000 // 16 + 1, dtype=torch.int32)
    ones = torch.ones(len(contexts) + 1, dtype=torch.int32)
    layout = SliceLayout(ones.cumsum(0), torch.tensor(contexts), (1,) * len(contexts), contexts)
    plan = plan_attention(layout, tables, torch.zeros(2, 16, 1, 8))
    read = sum(len(call.blocks) * 16 for call in plan.calls)
    assert sum(contexts) <= read <= 2 * sum(max(128, context) + 16 for context in contexts)
    assert len(plan.calls) < len(contexts) / 2


# --- the others -------------------------------------------------------------------------------------------


def normalized(x: Tensor, eps: float) -> Tensor:
    return x.double() * (x.double().square().mean(-1, keepdim=True) + eps).rsqrt()


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_round_where_their_line_does(dtype: torch.dtype) -> None:
    """Llama's norm rounds before and after the weight, Gemma's once; the values' norm has no weight."""
    x, weight = drawn(7, 50, dtype=dtype) * 3, drawn(50, seed=1, dtype=dtype)
    twice = normalized(x, 1e-2).float().to(dtype) * weight
    check(rms_norm(x, weight, 1e-2), twice, roundings=3)
    check(rms_norm_fp32(x, weight, 1e-2), normalized(x, 1e-2) * weight.double(), roundings=1.1)
    check(rms_norm_fp32(x, 1 + weight.float(), 1e-2), normalized(x, 1e-2) * (1 + weight.double()), roundings=1.1)
    check(rms_normalize(x, 1e-2), normalized(x, 1e-2), roundings=1.1)
    if dtype != torch.float32:
        assert not torch.equal(rms_norm(x, weight, 1e-2), rms_norm_fp32(x, weight, 1e-2))


def test_fused_norms_keep_the_residual() -> None:
    """The sum that the next layer starts from is the one that was normalised, rounded to the dtype."""
    x, residual = drawn(5, 40, dtype=torch.bfloat16), drawn(5, 40, seed=1, dtype=torch.bfloat16)
    weight, total = drawn(40, seed=2, dtype=torch.bfloat16), x + residual
    kept, added = residual.clone(), residual.clone()
    assert torch.equal(add_rms_norm_(x, kept, weight, 1e-5), rms_norm(total, weight, 1e-5))
    assert torch.equal(kept, total)
    rms_norm_add_(x, added, weight, 1e-5)
    assert torch.equal(added, residual + rms_norm_fp32(x, weight, 1e-5))
    scaled, scale, next_weight = residual.clone(), torch.tensor([0.3]).bfloat16(), weight.float() + 1
    normed = rms_norm_add_rms_norm_(x, scaled, weight, next_weight, 1e-5, scale)
    assert torch.equal(scaled, added * scale)
    assert torch.equal(normed, rms_norm_fp32(scaled, next_weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_turns_pairs_half_a_head_apart(dtype: torch.dtype) -> None:
    """Pair (d, d + D/2) turns by position · frequency d; lengths stay, position 0 is the identity."""
    x, positions = drawn(4, 3, 16, dtype=dtype), torch.tensor([0, 1, 77, 3000])
    cos, sin = rope_angles(positions, default_frequencies(16, 1e4), dtype)
    out = apply_rope(x, cos, sin)
    angles = positions[:, None].double() * torch.tensor([1e4 ** (-2 * i / 16) for i in range(8)], dtype=torch.float64)
    pairs = (
        torch.complex(x[..., :8].double(), x[..., 8:].double()) * torch.polar(torch.ones_like(angles), angles)[:, None]
    )
    check(out, torch.cat((pairs.real, pairs.imag), -1), roundings=4, absolute=1e-3 if dtype == torch.float32 else 0.03)
    assert torch.equal(out[0], x[0])


def test_proportional_rope_leaves_the_rest_alone() -> None:
    """A quarter of the pairs turns, with exponents over the whole head; the other pairs stand still."""
    frequencies = proportional_frequencies(512, 1e6, 0.25)
    assert frequencies.count_nonzero() == 64
    assert frequencies[63] == pytest.approx(1e6 ** (-2 * 63 / 512))
    x = drawn(1, 2, 512)
    out = apply_rope(x, *rope_angles(torch.tensor([5]), frequencies, torch.float32))
    assert torch.equal(out[..., 64:256], x[..., 64:256])
    assert torch.equal(out[..., 320:], x[..., 320:])
    assert not torch.isclose(out[..., :64], x[..., :64]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_activations(dtype: torch.dtype) -> None:
    """The first half is the gate, in both activations."""
    gate_up = drawn(5, 2 * 33, dtype=dtype)
    gate, up = gate_up[:, :33].double(), gate_up[:, 33:].double()
    check(silu_and_mul(gate_up), gate * torch.sigmoid(gate) * up, roundings=3)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    check(gelu_tanh_and_mul(gate_up), 0.5 * gate * (1 + torch.tanh(inner)) * up, roundings=3, absolute=1e-4)


def test_vocabulary_parallel_embedding_sums_to_the_whole() -> None:
    """Each token's row comes from exactly one of the ranks, the others give zeros."""
    table = drawn(12, 5)
    ids = torch.tensor([0, 11, 3, 4, 7, 8, 3])
    parts = [embed(ids, table[first : first + 4], first) for first in (0, 4, 8)]
    assert torch.equal(parts[0] + parts[1] + parts[2], table[ids])
    assert [int(part.ne(0).any(-1).sum()) for part in parts] == [3, 2, 2]


@pytest.mark.parametrize("rows", [1, 2, 17])
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_linear_is_linear(dtype: torch.dtype, rows: int) -> None:
    """Whatever layout a weight is packed in, the product has the reference's numbers."""
    x, weight = drawn(rows, 57, dtype=dtype), drawn(91, 57, seed=1, dtype=dtype)
    expected = x.double() @ weight.double().T
    for linear in (pack(weight), PlainLinear(weight)):
        check(linear(x), expected, roundings=1.1, absolute=1e-5 if dtype == torch.float32 else HALF_ULP[dtype])
    assert isinstance(pack(weight), OneDnnLinear) == (
        dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def test_a_device_without_kernels_is_refused() -> None:
    """A tensor where nothing can run is refused by the kernel's name."""
    with pytest.raises(NotImplementedError, match="silu_and_mul has no kernel for meta"):
        silu_and_mul(torch.empty(2, 4, device="meta"))
