"""What the runs are asked: stretches of a text of several kinds, some longer than a sliding window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from peg.checkpoint.directory import open_model_directory
from peg.checkpoint.fields import Fields
from peg.errors import ConfigError
from peg.text.tokenizer import Tokenizer

TEXT = """\
The harbour wakes before the town does. Gulls stand on the rail and wait for the first boat; the man who sells coffee \
lifts the shutter of his stall, sets out eleven cups and counts them twice. By seven the ice has come, 40 boxes of it, \
and by half past the fish: mackerel, a few cod, one ray that nobody ordered.

Water boils at 100 degrees Celsius at sea level. On a mountain of 3,000 metres it boils at about 90, because the air \
presses less hard on its surface, which is why rice takes longer there. The same law, read backwards, is a barometer.

def median(values):
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2

Question: Which of these numbers is prime: 51, 57, 59, 63?
Answer: 59, since 51 is 3 times 17, 57 is 3 times 19 and 63 is 7 times 9.

Le marché se tient le jeudi, sur la place de l'église. On y trouve des pommes, du miel, des couteaux et, une fois par \
mois, des livres. Der Zug fährt um 6 Uhr 15 ab und kommt, wenn nichts dazwischenkommt, um 9 Uhr 40 an.

{"name": "north gate", "open": true, "hours": [8, 18], "keys": {"spare": 2, "lost": 1}}

She folded the letter along its old creases and put it back. "You could have told me," she said. He could have, and he \
had meant to, on the bridge, in the kitchen, in the long queue for the museum; there had always been something else to \
look at. Outside it had begun to snow again, in large slow flakes that did not seem to arrive anywhere.
"""
_SHORT = (24, 61, 5, 40, 12, 90, 3, 33)  # odd sizes, so that blocks and chunks end anywhere
_LONG = 200  # where there is no window to be longer than
_BEYOND = 17
_LONGEST = 1 << 17
_LEAST = 4


@dataclass(frozen=True, slots=True)
class Prompts:
    """Token ids. The first of `texts` is read alone, too; `front` is the first half of `whole`."""

    texts: tuple[tuple[int, ...], ...]
    whole: tuple[int, ...]

    @property
    def front(self) -> tuple[int, ...]:
        return self.whole[: len(self.whole) // 2]


def make_prompts(model_dir: Path, count: int, new_tokens: int, max_model_len: int | None) -> Prompts:
    """`count` prompts for a model, with room for new tokens behind each.

    Every third is longer than the model's sliding window, where it has one. Raises CheckpointError without a
    tokenizer, ConfigError where there is no room.
    """
    tokenizer = Tokenizer.load(model_dir)
    config = Fields(open_model_directory(model_dir).config)
    text = config.section("text_config") or config
    room = (max_model_len or text.integer("max_position_embeddings", default=_LONGEST)) - new_tokens
    if room < _LEAST:
        raise ConfigError(f"--max-model-len {max_model_len}: {room} tokens are no room for a prompt beside new ones")
    window = text.optional_integer("sliding_window")
    start = () if tokenizer.bos_token_id is None else (tokenizer.bos_token_id,)
    ids = tokenizer.encode(TEXT)
    long = window + 1 if window else _LONG
    texts = []
    for index in range(count):
        size = long + _BEYOND * index if index % 3 == 0 else _SHORT[index % len(_SHORT)]
        texts.append(_stretch(start, ids, len(ids) * index // count, min(size, room)))
    return Prompts(tuple(texts), _stretch(start, ids, 0, min(2 * max(long + _BEYOND, _LONG // 2), room)))


def _stretch(start: tuple[int, ...], ids: Sequence[int], offset: int, size: int) -> tuple[int, ...]:
    """So many tokens from `offset` on, around the text as often as it takes, behind the token that begins a text."""
    return (start + tuple(ids[(offset + place) % len(ids)] for place in range(size)))[:size]
