"""Text to token ids and back: Hugging Face `tokenizers` for the way in, a table of bytes for the way out."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.processors import TemplateProcessing

from peg.errors import CheckpointError, InvalidRequest
from peg.text.model_files import read_json, special_tokens
from peg.text.token_bytes import TokenBytes

# Below this a call costs the loop less than the hand-over to a thread and back (0.2 ms at 1,000 bytes).
_SHORT_BYTES = 1024


class Tokenizer:
    """The tokenizer of one model. Nothing changes after construction, so every thread may use it.

    `special_tokens` are the named ones (`bos_token` and so on) as text, `special_ids` the ids of all that count as
    special. `vocab_size` is one more than the highest id; ids below it may be unused (`has`).
    """

    def __init__(self, core: tokenizers.Tokenizer, config: Mapping[str, Any] | None = None) -> None:
        """`config` is tokenizer_config.json. `core` is taken over: padding and truncation are switched off.

        Raises CheckpointError where the two contradict each other or the decoder is of an unknown kind.
        """
        config = config or {}
        self.special_tokens = special_tokens(config)
        _check_declared(core, config, self.special_tokens)
        core.no_padding()
        core.no_truncation()
        _set_post_processor(core, config, self.special_tokens)
        self._core = core
        tokens = {token_id: token for token, token_id in core.get_vocab(True).items()}
        added = core.get_added_tokens_decoder()
        # The decoder's pickled state is its JSON in tokenizer.json; writing out all of it takes a second.
        table = TokenBytes.from_decoder(json.loads(core.decoder.__getstate__()) if core.decoder else None)
        self.vocab_size = max(tokens, default=-1) + 1
        self._bytes = [table.of(tokens.get(i), is_added=i in added) for i in range(self.vocab_size)]
        self._unused_ids = frozenset(token_id for token_id, raw in enumerate(self._bytes) if raw is None)
        self._stripped_spaces = table.stripped_spaces
        self.longest_token_bytes = max((len(raw) for raw in self._bytes if raw is not None), default=0)
        named = {core.token_to_id(token) for token in self.special_tokens.values()}
        special = {token_id for token_id, token in added.items() if token.special}
        self.special_ids = frozenset(token_id for token_id in named | special if token_id is not None)
        self.bos_token_id = self.token_id(self.special_tokens.get("bos_token"))
        self.eos_token_id = self.token_id(self.special_tokens.get("eos_token"))
        self._adds_bos = core.encode("").ids[:1] == [self.bos_token_id]

    @classmethod
    def load(cls, model_dir: Path) -> Tokenizer:
        """The tokenizer in `model_dir`: tokenizer.json, and tokenizer_config.json where there is one."""
        path = model_dir / "tokenizer.json"
        if not path.exists():
            raise CheckpointError(f"{path}: no such file; peg reads the tokenizer from tokenizer.json alone")
        # tokenizers raises the bare Exception for any fault in the file; as a future's outcome it is a value.
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            made = pool.submit(tokenizers.Tokenizer.from_file, str(path))
        if error := made.exception():
            raise CheckpointError(f"{path}: {error}") from error
        core = made.result()
        return cls(core, read_json(model_dir / "tokenizer_config.json"))

    # --- text to ids -------------------------------------------------------------------------------------

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """The ids of a short text, on the calling thread. Special tokens written in the text become their ids.

        With `add_special_tokens` the tokenizer adds what it always adds, but no second BOS before one that is
        written in the text. Raises InvalidRequest for a lone surrogate.
        """
        utf8_length(text)
        # encode_batch_fast releases the interpreter lock for its whole run; encode keeps it.
        ids: list[int] = self._core.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        doubled = add_special_tokens and self._adds_bos and ids[:2] == [self.bos_token_id] * 2
        return ids[1:] if doubled else ids

    async def encode_async(
        self, text: str, *, context_tokens: int, add_special_tokens: bool = False, param: str | None = None
    ) -> list[int]:
        """`encode` for text of any length, a long one on a worker thread, so that the loop goes on.

        Raises InvalidRequest (with `param`) before tokenising a text that cannot fit into `context_tokens`,
        whatever its tokens are, and for a lone surrogate.
        """
        size_bytes = utf8_length(text, param)
        limit_bytes = context_tokens * self.longest_token_bytes
        if size_bytes > limit_bytes:
            raise InvalidRequest(
                f"the text has {size_bytes} bytes; the context of {context_tokens} tokens holds at most "
                f"{limit_bytes} (its longest token has {self.longest_token_bytes})",
                param,
            )
        if size_bytes <= _SHORT_BYTES:
            return self.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.encode, text, add_special_tokens=add_special_tokens)

    # --- ids to text -------------------------------------------------------------------------------------

    def has(self, token_id: int) -> bool:
        """Whether the tokenizer has a token with this id. A model's padded vocabulary has more ids."""
        return 0 <= token_id < self.vocab_size and self._bytes[token_id] is not None

    def first_unknown(self, ids: Sequence[int]) -> int | None:
        """The first of `ids` that no token has, None where all are known. Made for prompts of any length."""
        if not ids or (max(ids) < self.vocab_size and min(ids) >= 0 and self._unused_ids.isdisjoint(ids)):
            return None
        return next((token_id for token_id in ids if not self.has(token_id)), None)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token stands for, half a character included; none for an id without a token."""
        return (self._bytes[token_id] or b"") if 0 <= token_id < self.vocab_size else b""

    def token_id(self, token: str | None) -> int | None:
        """The id of the token spelled `token` in the vocabulary, None where there is none."""
        token_id: int | None = None if token is None else self._core.token_to_id(token)
        return token_id

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it (`Ġthe`, `▁the`), None for an id without one."""
        token: str | None = self._core.id_to_token(token_id) if token_id >= 0 else None
        return token

    def skipped_ids(self, keep: Iterable[str] = ()) -> frozenset[int]:
        """What `skip_special_tokens` leaves out: the special ids, except those of the tokens in `keep`."""
        return self.special_ids - {self.token_id(token) for token in keep}

    def decode(self, ids: Sequence[int], *, skipped: frozenset[int] = frozenset()) -> str:
        """The text of a whole sequence, a prompt for instance; what is not UTF-8 becomes U+FFFD.

        A tokenizer that puts a space before every text has it taken away again. Text that continues a prompt
        keeps its first space and is the `Detokenizer`'s.
        """
        raw = b"".join(self.token_bytes(token_id) for token_id in ids if token_id not in skipped)
        text = raw.decode("utf-8", "replace")
        spaces = len(text) - len(text.lstrip(" "))
        return text[min(spaces, self._stripped_spaces) :]


def utf8_length(text: str, param: str | None = None) -> int:
    """Bytes of `text` in UTF-8. Raises InvalidRequest for a lone surrogate, which UTF-8 cannot hold."""
    if text.isascii():
        return len(text)  # known without a look at the text, which may be megabytes
    try:
        return len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        found = f"U+{ord(text[error.start]):04X} at character {error.start}"
        raise InvalidRequest(f"the text holds a lone surrogate, {found}, which is not valid Unicode", param) from None


def _check_declared(core: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Raise CheckpointError for tokens that tokenizer_config.json declares and tokenizer.json does not have."""
    faults = [f"{name} {token!r} is no token" for name, token in named.items() if core.token_to_id(token) is None]
    for key, declared in config.get("added_tokens_decoder", {}).items():
        content, found = declared.get("content"), core.id_to_token(int(key))
        if content != found:
            faults.append(f"added token {content!r} with id {key} is {found!r} there")
    if faults:
        raise CheckpointError("tokenizer_config.json does not fit tokenizer.json", faults)


def _set_post_processor(core: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Let add_bos_token and add_eos_token decide, where given, what is added to a text (as transformers does)."""
    if "add_bos_token" not in config and "add_eos_token" not in config:
        return
    added: dict[str, list[str]] = {"bos_token": [], "eos_token": []}
    for name, tokens in added.items():
        if config.get(f"add_{name}"):
            if name not in named:
                raise CheckpointError(f"tokenizer_config.json: add_{name} is true, but there is no {name}")
            tokens.append(named[name])
    pieces = [*added["bos_token"], "$A", *added["eos_token"]]
    ids = [(token, core.token_to_id(token)) for tokens in added.values() for token in tokens]
    core.post_processor = TemplateProcessing(single=pieces, special_tokens=ids)
