"""Counter-based Gumbel noise: a number depends on its row's key and its token id, and on nothing else.

Uniform bits come from `lowbias32`, Chris Wellons' mixing function of 32-bit integers (found by hash-prospector, in the
public domain), with the two halves of the key mixed in before and between its multiplications; they are exact on every
device. From bits h comes v = (h >> 1) · 2⁻³¹ plus half a step, kept below one, and from it the noise
g = −log(−log1p(−v)): the upper tail, which decides who wins, has full precision, up to 22.2. argmax(logits + g) samples
from softmax(logits) (Gumbel 1954).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from peg.kernels.device import on_cpu

_MASK = 0xFFFFFFFF
_SHIFTS = (16, 15, 16)
_FACTORS = (0x7FEB352D, 0x846CA68B)
_HALF_STEP = 0.5
_STEP = 2.0**-31 * (1 - 2.0**-24)
_BLOCK = 1024


def noise_key(seed: int, position: int) -> tuple[int, int]:
    """Two integers of 32 bits for the token at `position` of a sequence with this seed, of which 64 bits are used."""
    words = (seed & _MASK, (seed >> 32) & _MASK, position & _MASK)
    first, second = 0x9E3779B9, 0x85EBCA6B
    for word in words:
        first, second = _lowbias32(first ^ word), _lowbias32(second ^ word)
    return first, second


def gumbel(ids: Tensor, key: tuple[int, int]) -> Tensor:
    """One row's noise, float32, for token ids int32 [n]; `key` is a `noise_key`."""
    if not on_cpu("gumbel", ids):
        return _gumbel(ids, key)
    bits = ids ^ _signed(key[0])
    _shift_xor(bits, _SHIFTS[0]).mul_(_signed(_FACTORS[0])).bitwise_xor_(_signed(key[1]))
    _shift_xor(bits, _SHIFTS[1]).mul_(_signed(_FACTORS[1]))
    uniform = _shift(_shift_xor(bits, _SHIFTS[2]), 1).float().add_(_HALF_STEP).mul_(-_STEP)
    return uniform.log1p_().neg_().log_().neg_()


def _shift(bits: Tensor, count: int) -> Tensor:
    """Unsigned shift: one of signed numbers drags the sign along, the mask takes it off again."""
    return (bits >> count).bitwise_and_((1 << (32 - count)) - 1)


def _shift_xor(bits: Tensor, count: int) -> Tensor:
    return bits.bitwise_xor_(_shift(bits, count))


def _signed(value: int) -> int:
    """The int32 of the same bits."""
    return value - (value >> 31 << 32)


def _lowbias32(value: int) -> int:
    value = (value ^ value >> _SHIFTS[0]) * _FACTORS[0] & _MASK
    value = (value ^ value >> _SHIFTS[1]) * _FACTORS[1] & _MASK
    return value ^ value >> _SHIFTS[2]


@triton.jit
def gumbel_noise(b_id, key0, key1):
    """`gumbel`, within a kernel: float32 for int32 ids and a key of two uint32."""
    b_bits = b_id.to(tl.uint32, bitcast=True) ^ key0
    b_bits = ((b_bits ^ (b_bits >> 16)) * 0x7FEB352D) ^ key1
    b_bits = (b_bits ^ (b_bits >> 15)) * 0x846CA68B
    b_bits = b_bits ^ (b_bits >> 16)
    b_u = ((b_bits >> 1).to(tl.int32).to(tl.float32) + 0.5) * -4.656612595521636e-10  # −_STEP
    b_w = 1.0 + b_u
    # log1p(u) is log(w) · u / (w − 1) for w = 1 + u as rounded (Kahan), and u itself where w is 1
    b_log1p = tl.where(b_w == 1.0, b_u, tl.log(b_w) * tl.div_rn(b_u, tl.where(b_w == 1.0, 1.0, b_w - 1.0)))
    return -tl.log(-b_log1p)


@triton.jit(do_not_specialize=["key0", "key1", "count"])
def _gumbel_kernel(p_ids, p_out, key0, key1, count, BLOCK: tl.constexpr):
    o_i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_id = tl.load(p_ids + o_i, mask=o_i < count, other=0)
    tl.store(p_out + o_i, gumbel_noise(b_id, key0.to(tl.uint32), key1.to(tl.uint32)), mask=o_i < count)


def _gumbel(ids: Tensor, key: tuple[int, int]) -> Tensor:
    assert ids.is_contiguous(), ids.stride()
    out = torch.empty(ids.shape, dtype=torch.float32, device=ids.device)
    _gumbel_kernel[(triton.cdiv(ids.numel(), _BLOCK),)](ids, out, _signed(key[0]), _signed(key[1]), ids.numel(), _BLOCK)
    return out
