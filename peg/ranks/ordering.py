"""Tokens in order: by logit, highest first, and by id, lowest first, among equal ones; as one integer each.

A key is int64: the logit's bits, turned so that they order as integers do, above the complement of the id. Keys are
unique, so the order is total, and the best over all ranks is simply the largest.
"""

from __future__ import annotations

import torch
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
