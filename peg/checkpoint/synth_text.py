"""Tokenizers and chat templates of synthetic models: small, but of the kind that real ones have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

_WORDS = (
    *("the", "of", "and", "to", "in", "is", "that", "it", "was", "for", "on", "with", "as", "are", "be", "this"),
    *("from", "have", "not", "which", "water", "people", "their", "number", "return", "time", "word", "model"),
)
_TEMPLATE = """\
{{{{ bos_token }}}}{{% for message in messages %}}{{{{ '{before}' + {role} + '{between}' }}}}\
{{{{ message['content'] | trim }}}}{{{{ '{after}' }}}}{{% endfor %}}\
{{% if add_generation_prompt %}}{{{{ '{before}{assistant}{between}' }}}}{{% endif %}}"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The special tokens of a family, and how a turn is written. `first` have the lowest ids, `last` the highest.

    `roles` name a token each: bos where texts begin with one, eos, pad, and image, which stands for whatever is not
    text. `ends` end an answer.
    """

    first: tuple[str, ...] = ()
    last: tuple[str, ...]
    roles: Mapping[str, str]
    ends: tuple[str, ...]
    turn: tuple[str, str, str]
    assistant: str = "assistant"

    @property
    def template(self) -> str:
        """The chat template: each turn is what stands before the role, the role, and so on."""
        role = "message['role']"
        if self.assistant != "assistant":
            role = f"({role} | replace('assistant', '{self.assistant}'))"
        before, between, after = (part.replace("\n", "\\n") for part in self.turn)
        return _TEMPLATE.format(before=before, between=between, after=after, role=role, assistant=self.assistant)


def _gemma(start: str, end: str, *ends: str) -> Tokens:
    return Tokens(
        first=("<pad>", "<eos>", "<bos>", "<unk>"),
        last=(start, end, *ends, "<image_soft_token>"),
        roles={"bos": "<bos>", "eos": "<eos>", "pad": "<pad>", "image": "<image_soft_token>"},
        ends=("<eos>", end, *ends),
        turn=(start, "\n", f"{end}\n"),
        assistant="model",
    )


TOKENS: Mapping[str, Tokens] = {
    "llama3": Tokens(
        last=("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        roles={"bos": "<|begin_of_text|>", "eos": "<|eot_id|>", "pad": "<|end_of_text|>"},
        ends=("<|end_of_text|>", "<|eot_id|>"),
        turn=("<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>"),
    ),
    "chatml": Tokens(
        last=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        roles={"eos": "<|im_end|>", "pad": "<|endoftext|>"},
        ends=("<|im_end|>", "<|endoftext|>"),
        turn=("<|im_start|>", "\n", "<|im_end|>\n"),
    ),
    "gemma3": _gemma("<start_of_turn>", "<end_of_turn>"),
    "gemma4": _gemma("<|turn>", "<turn|>", "<|tool_response>"),
}


def build_tokenizer(tokens: Tokens) -> Tokenizer:
    """A byte-level BPE: every byte is a token, some English words are merged, special tokens stand at either end."""
    pieces = [*tokens.first, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = []
    for spelled in (*(f"Ġ{word}" for word in _WORDS), *_WORDS):  # Ġ is how a byte level spells a space
        for end in range(2, len(spelled) + 1):
            if spelled[:end] not in pieces:
                pieces.append(spelled[:end])
                merges.append((spelled[: end - 1], spelled[end - 1]))
    pieces += tokens.last
    tokenizer = Tokenizer(BPE(vocab={piece: token_id for token_id, piece in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in (*tokens.first, *tokens.last)])
    return tokenizer


def role_ids(tokens: Tokens, tokenizer: Tokenizer) -> dict[str, int]:
    """The id of each role's token."""
    vocabulary = tokenizer.get_vocab()
    return {role: vocabulary[token] for role, token in tokens.roles.items()}


def tokenizer_config(tokens: Tokens) -> dict[str, object]:
    """tokenizer_config.json."""
    named = {f"{role}_token": token for role, token in tokens.roles.items() if role != "image"}
    return {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **named}
