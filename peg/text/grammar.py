"""Structured output: a schema, a regex, a choice or a grammar, compiled into which tokens may come next."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from

from peg.errors import InvalidRequest
from peg.text.tokenizer import Tokenizer, utf8_length

MAX_SOURCE_BYTES = 1 << 16
MAX_CHOICES = 1024
_LONGEST_REASON = 400
_LONGEST_BLANK = 40  # between two JSON tokens, so that no model fills its context with blanks
_JSON_OPTIONS: Mapping[str, Any] = {
    "lenient": False,  # a keyword that would not be enforced is an error, whatever the schema says about that
    "coerce_one_of": False,
    "whitespace_flexible": True,
    "whitespace_pattern": rf"[ \n\r\t]{{1,{_LONGEST_BLANK}}}",
}


# --- sources: the texts that `GrammarCompiler` takes ----------------------------------------------------------


def json_schema(schema: Mapping[str, Any] | bool, param: str) -> str:
    """JSON that fits a schema. Raises InvalidRequest over the size limit."""
    try:
        text = json.dumps({} if schema is True else {"not": {}} if schema is False else schema)
        _check_size(text, param)
        return LLMatcher.grammar_from_json_schema(text, overrides=dict(_JSON_OPTIONS))  # type: ignore[arg-type]
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(str(error), param) from None


def regex(pattern: str, param: str) -> str:
    """The whole text matches a regular expression, in the syntax of Rust's `regex`."""
    _check_size(pattern, param)
    return LLMatcher.grammar_from_regex(pattern)


def choice(texts: Sequence[str], param: str) -> str:
    """One of several texts."""
    if len(texts) > MAX_CHOICES:
        raise InvalidRequest(f"{len(texts)} choices: at most {MAX_CHOICES}", param)
    source = "start: " + " | ".join(map(quoted, texts))
    _check_size(source, param)
    return _lark(source)


def context_free(source: str, param: str) -> str:
    """A grammar in Lark's syntax, or in GBNF, which has `::=` in it."""
    _check_size(source, param)
    try:
        return _lark(grammar_from("gbnf", source) if "::=" in source else source)
    except ValueError as error:
        raise InvalidRequest(str(error), param) from None


def _lark(source: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": source}]})


def quoted(text: str) -> str:
    """A text as a literal of Lark's syntax."""
    return json.dumps(text, ensure_ascii=False)


def _check_size(source: str, param: str) -> None:
    size = utf8_length(source, param)
    if size > MAX_SOURCE_BYTES:
        raise InvalidRequest(f"{size} bytes: at most {MAX_SOURCE_BYTES}", param)


# --- compiled -------------------------------------------------------------------------------------------------


class TokenGrammar:
    """One sequence's place in a grammar: the engine's `Grammar`. Used by one thread at a time.

    `allowed` has a bit set for each token that the model may sample at all.
    """

    def __init__(self, matcher: LLMatcher, allowed: int) -> None:
        """Raises InvalidRequest where nothing fits."""
        self._matcher = matcher
        self._allowed = allowed
        self.first_mask = self._mask()

    def advance(self, token_id: int) -> bytes | None:
        """Take in one more token; the mask for the next, None where nothing can follow. Raises InvalidRequest."""
        self._matcher.consume_token(token_id)
        self._check()
        return None if self._matcher.is_stopped() else self._mask()

    def copy(self) -> TokenGrammar:
        """The same place, for another sequence."""
        return TokenGrammar(self._matcher.deep_copy(), self._allowed)

    def _mask(self) -> bytes:
        fitting = self._matcher.compute_bitmask()
        self._check()
        mask = int.from_bytes(fitting, "little") & self._allowed
        if not mask:
            raise InvalidRequest("structured output: there is no token that fits")
        return mask.to_bytes(len(fitting), "little")

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InvalidRequest(f"structured output: {_reason(self._matcher)}")


class GrammarCompiler:
    """Compiles grammars over the tokens of one model. Nothing changes after construction, so every thread may use it.

    Construction takes some tenths of a second for 50,000 tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, vocab_size: int, end_ids: Collection[int], forbidden_ids: Collection[int] = ()
    ) -> None:
        """The model's own numbers: `end_ids` may come where a text is complete, `forbidden_ids` never."""
        self._tokens = LLTokenizer(TokenizerWrapper(_TokenTable(tokenizer, min(end_ids))), eos_token=sorted(end_ids))
        self._limits = LLParserLimits(verbose_errors=False)
        self._allowed = (1 << vocab_size) - 1
        for token_id in forbidden_ids:
            self._allowed &= ~(1 << token_id)

    def compile(self, source: str, param: str) -> TokenGrammar:
        """A grammar at its start. Raises InvalidRequest for one that is faulty, too large or fits no text.

        Takes up to a few seconds for the largest ones and does not hold the interpreter lock.
        """
        matcher = LLMatcher(self._tokens, source, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise InvalidRequest(_reason(matcher), param)
        if warnings := matcher.get_grammar_warnings():
            raise InvalidRequest(f"cannot be enforced: {'; '.join(warnings)}", param)
        try:
            return TokenGrammar(matcher, self._allowed)
        except InvalidRequest as error:
            raise InvalidRequest(str(error), param) from None


class _TokenTable:
    """What llguidance needs to know of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, end_id: int) -> None:
        self.eos_token_id = end_id
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_ids)
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)


def _reason(matcher: LLMatcher) -> str:
    """What went wrong, on one line of a length that a message can have."""
    return " ".join(matcher.get_error().split())[:_LONGEST_REASON]
