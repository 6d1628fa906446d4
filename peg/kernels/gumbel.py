"""Counter-based Gumbel noise: a number depends on its row's key and its token id, and on nothing else.

Uniform bits come from `lowbias32`, Chris Wellons' mixing function of 32-bit integers (found by hash-prospector, in the
public domain), with the two halves of the key mixed in before and between its multiplications; they are exact on every
device. From bits h comes v = (h >> 1) · 2⁻³¹ plus half a step, kept below one, and from it the noise
g = −log(−log1p(−v)): the upper tail, which decides who wins, has full precision, up to 22.2. argmax(logits + g) samples
from softmax(logits) (Gumbel 1954).
"""

from __future__ import annotations

from torch import Tensor

from peg.kernels.device import on_cpu

_MASK = 0xFFFFFFFF
_SHIFTS = (16, 15, 16)
_FACTORS = (0x7FEB352D, 0x846CA68B)
_HALF_STEP = 0.5
_STEP = 2.0**-31 * (1 - 2.0**-24)


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
        raise NotImplementedError("gumbel has no kernel for cuda")
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
