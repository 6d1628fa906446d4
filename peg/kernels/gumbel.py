"""Counter-based Gumbel noise: a number depends on its row's key and its token id, and on nothing else.

Uniform bits come from `lowbias32`, Chris Wellons' mixing function of 32-bit integers (found by hash-prospector, in the
public domain), applied twice: h = mix(mix(id ^ key0) ^ key1). These are exact on every device. From them comes
g = −log(−log1p(−v)), v = (h >> 1) · 2⁻³¹ plus half a step, kept below one, so that the upper tail, which decides who
wins, has full precision up to 22.2; argmax(logits + g) then samples from softmax(logits) (Gumbel 1954).
"""

from __future__ import annotations

import torch
from torch import Tensor

from peg.kernels.device import on_cpu

_MASK = 0xFFFFFFFF
_MIX = ((16, 0x7FEB352D), (15, 0x846CA68B))
_LAST_SHIFT = 16
_HALF_STEP = 0.5
_STEP = 2.0**-31 * (1 - 2.0**-24)


def noise_key(seed: int, position: int) -> tuple[int, int]:
    """Two 32-bit integers, as int32, for the token at `position` of a sequence with this seed (64 bits are used)."""
    words = (seed & _MASK, (seed >> 32) & _MASK, position & _MASK)
    keys = []
    for salt in (0x9E3779B9, 0x85EBCA6B):
        key = salt
        for word in words:
            key = _mix_int(key ^ word)
        keys.append(key - (key >> 31 << 32))
    return keys[0], keys[1]


def gumbel(keys: Tensor, first_id: int, count: int) -> Tensor:
    """Noise float32 [rows, count] for the ids from `first_id` on; keys int32 [rows, 2] are `noise_key`s."""
    if not on_cpu("gumbel", keys):
        raise NotImplementedError("gumbel has no kernel for cuda")
    ids = torch.arange(first_id, first_id + count, dtype=torch.int32)
    bits = _mix(_mix(ids ^ keys[:, :1]).bitwise_xor_(keys[:, 1:]))
    uniform = (bits >> 1).bitwise_and_(0x7FFFFFFF).float().add_(_HALF_STEP).mul_(-_STEP)
    return uniform.log1p_().neg_().log_().neg_()


def _mix(bits: Tensor) -> Tensor:
    """lowbias32 of int32, in place. A shift of signed numbers drags the sign along; the mask takes it off again."""
    for shift, factor in _MIX:
        bits.bitwise_xor_((bits >> shift).bitwise_and_((1 << (32 - shift)) - 1)).mul_(factor - (factor >> 31 << 32))
    return bits.bitwise_xor_((bits >> _LAST_SHIFT).bitwise_and_((1 << (32 - _LAST_SHIFT)) - 1))


def _mix_int(value: int) -> int:
    """lowbias32 of a Python integer of 32 bits."""
    for shift, factor in _MIX:
        value = (value ^ (value >> shift)) * factor & _MASK
    return value ^ (value >> _LAST_SHIFT)
