"""Tokens in order: by logit, highest first, and by id, lowest first, among equal ones; as one integer each.

A key is int64: the logit's bits, turned so that they order as integers do, above the complement of the id. Keys are
unique, so the order is total, and the best over all ranks is simply the largest.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_MASK = 0xFFFFFFFF
_SIGN = 0x7FFFFFFF


def order_keys(logits: Tensor, ids: Tensor) -> Tensor:
    """int64 keys for float32 logits, none of them NaN, and int64 ids; shapes broadcast."""
    bits = (logits + 0.0).view(torch.int32)  # −0 becomes 0, which it equals
    return _turn(bits).long().bitwise_left_shift_(32) + (_MASK - ids)


def key_ids(keys: Tensor) -> Tensor:
    """The ids int64 of keys."""
    return _MASK - (keys & _MASK)


def key_logits(keys: Tensor) -> Tensor:
    """The logits float32 of keys."""
    return _turn((keys >> 32).int()).view(torch.float32)


def _turn(bits: Tensor) -> Tensor:
    """Float bits to integers of the same order, and back: negative numbers order the other way round."""
    return bits ^ ((bits >> 31) & _SIGN)


@triton.jit
def unsigned_order(b_x):
    """uint32 numbers in the order of float32 ones, within a kernel. −0 and 0 are one, NaN lies beyond infinity."""
    b_bits = (b_x + 0.0).to(tl.uint32, bitcast=True)
    return tl.where(b_bits >> 31 == 1, b_bits ^ 0xFFFFFFFF, b_bits | 0x80000000)


@triton.jit
def from_unsigned_order(b_ordered):
    """What `unsigned_order` made of float32 numbers, back."""
    b_bits = tl.where(b_ordered >> 31 == 1, b_ordered ^ 0x80000000, b_ordered ^ 0xFFFFFFFF)
    return b_bits.to(tl.float32, bitcast=True)


@triton.jit
def order_key(b_x, b_id):
    """`order_keys`, within a kernel."""
    b_turned = (unsigned_order(b_x) ^ 0x80000000).to(tl.int32, bitcast=True)
    return (b_turned.to(tl.int64) << 32) + (0xFFFFFFFF - b_id.to(tl.int64))
