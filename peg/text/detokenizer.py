"""Token ids to text, one id at a time."""

from __future__ import annotations

import codecs

from peg.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one generated sequence, as it grows. Owned by whoever feeds it; one per sequence.

    The sequence continues a prompt, of which nothing is looked at: its half characters do not reach this text, and
    the first token keeps its space. All pieces joined are the UTF-8 decoding of the tokens' bytes, however the ids
    are cut, and each call costs the token's own length.
    """

    def __init__(self, tokenizer: Tokenizer, *, skipped: frozenset[int] = frozenset()) -> None:
        """Ids in `skipped` give no text; `Tokenizer.skipped_ids` says which are usual."""
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._begun = False  # a character, of which the decoder holds the first bytes

    def feed(self, token_id: int) -> str:
        """The code points that this token completes; bytes that can never become one are U+FFFD."""
        if token_id in self._skipped:
            return ""
        raw = self._tokenizer.token_bytes(token_id)
        if not self._begun and raw.isascii():
            return raw.decode("ascii")  # most tokens, in a fifth of the decoder's time
        text = self._decoder.decode(raw)
        self._begun = self._decoder.getstate()[0] != b""
        return text

    def finish(self) -> str:
        """What an unfinished last character becomes: U+FFFD, or nothing."""
        return self._decoder.decode(b"", final=True)
