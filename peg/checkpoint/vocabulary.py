"""Which ids of a model's embedding have no token: the table is often padded beyond the tokenizer."""

from __future__ import annotations

from pathlib import Path

import msgspec

from peg.errors import CheckpointError


class _Added(msgspec.Struct):
    id: int


class _Vocabulary(msgspec.Struct):
    """`model` of tokenizer.json: ids by piece, or in a unigram model pieces in the order of their ids."""

    vocab: dict[str, int] | list[tuple[str, float]] = msgspec.field(default_factory=dict)


class _Tokenizer(msgspec.Struct):
    model: _Vocabulary
    added_tokens: list[_Added] = msgspec.field(default_factory=list)


def ids_without_token(model_dir: Path, vocab_size: int) -> tuple[int, ...]:
    """The ids below `vocab_size` that stand for nothing; none without a tokenizer.json.

    Raises CheckpointError.
    """
    path = model_dir / "tokenizer.json"
    if not path.exists():
        return ()
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_Tokenizer)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    vocab = found.model.vocab
    known = set(vocab.values() if isinstance(vocab, dict) else range(len(vocab)))
    known.update(added.id for added in found.added_tokens)
    return tuple(token_id for token_id in range(vocab_size) if token_id not in known)
