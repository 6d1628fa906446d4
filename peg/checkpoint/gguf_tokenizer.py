"""tokenizer.json and its companions, rebuilt from the vocabulary inside a GGUF file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from peg.checkpoint.gguf_file import GgufFile
from peg.errors import CheckpointError

_CONTROL, _USER_DEFINED = 3, 4
_ROLES: Mapping[str, str] = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_SPACE = "\u2581"


def build_tokenizer(file: GgufFile) -> Tokenizer:
    """The tokenizer of a file. Raises CheckpointError for a kind that peg does not know."""
    fields = file.fields
    fields.expect("tokenizer.ggml.add_space_prefix", False)
    fields.expect("tokenizer.ggml.add_eos_token", False)
    kind = (fields.text("tokenizer.ggml.model"), fields.text("tokenizer.ggml.pre", default="default"))
    if kind == ("gpt2", "smollm"):
        return _byte_level(file)
    if kind == ("llama", "default") and file.architecture == "gemma3":
        return _gemma(file)
    raise fields.error("tokenizer.ggml.pre", f"peg does not know this tokenizer of model {kind[0]}")


def special_ids(file: GgufFile) -> dict[str, int | list[int]]:
    """The token ids of bos, eos and pad, where the file has them; two ids that end a text are a list."""
    ids: dict[str, int | list[int]] = {}
    for role in ("bos", "eos", "pad"):
        if (token_id := _token_id(file, _ROLES[role])) is not None:
            ids[f"{role}_token_id"] = token_id
    eos, eot = ids.get("eos_token_id"), _token_id(file, "eot")
    if isinstance(eos, int) and eot is not None and eot != eos:
        ids["eos_token_id"] = [eos, eot]
    return ids


def tokenizer_config(file: GgufFile) -> dict[str, object]:
    """tokenizer_config.json: which tokens have a role. The chat template is a file of its own."""
    # This class takes tokenizer.json as it is; those named after a model family rebuild parts of it.
    config: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    tokens = file.strings("tokenizer.ggml.tokens")
    for role, name in _ROLES.items():
        if (token_id := _token_id(file, name)) is not None:
            config[f"{role}_token"] = tokens[token_id]
    return config


def _token_id(file: GgufFile, name: str) -> int | None:
    field = f"tokenizer.ggml.{name}_token_id"
    token_id = file.fields.optional_integer(field, minimum=0)
    size = len(file.strings("tokenizer.ggml.tokens"))
    if token_id is not None and token_id >= size:
        raise file.fields.error(field, f"the vocabulary has {size} tokens")
    return token_id


def _byte_level(file: GgufFile) -> Tokenizer:
    if file.fields.boolean("tokenizer.ggml.add_bos_token", default=False):
        raise file.fields.error("tokenizer.ggml.add_bos_token", "no tokenizer of this kind that peg knows adds one")
    vocabulary = _vocabulary(file, file.strings("tokenizer.ggml.tokens"))
    merges = [_merge(file, line, vocabulary) for line in file.strings("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges))
    # Digits are split one by one before spaces are attached to words; the other order gives other ids.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, file)
    return tokenizer


def _gemma(file: GgufFile) -> Tokenizer:
    # Runs of spaces are stored as they are read; the normalizer spells every space in another way.
    tokens = file.strings("tokenizer.ggml.tokens")
    vocabulary = _vocabulary(file, tuple(_SPACE * len(token) if _is_spaces(token) else token for token in tokens))
    unk_id, bos_id = _token_id(file, "unknown"), _token_id(file, "bos")
    if unk_id is None or bos_id is None:
        raise CheckpointError(f"{file.path}: tokenizer.ggml.unknown_token_id or bos_token_id is missing")
    model = BPE(
        vocabulary, list(_rebuilt_merges(vocabulary)), unk_token=tokens[unk_id], fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    if file.fields.boolean("tokenizer.ggml.add_bos_token", default=True):
        bos = tokens[bos_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, bos_id)]
        )
    _add_tokens(tokenizer, file)
    return tokenizer


def _vocabulary(file: GgufFile, tokens: tuple[str, ...]) -> dict[str, int]:
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise CheckpointError(f"{file.path}: tokenizer.ggml.tokens holds {len(tokens) - len(vocabulary)} tokens twice")
    return vocabulary


def _merge(file: GgufFile, line: str, vocabulary: dict[str, int]) -> tuple[str, str]:
    left, _, right = line.partition(" ")
    if left in vocabulary and right in vocabulary and left + right in vocabulary:
        return left, right
    raise CheckpointError(f"{file.path}: tokenizer.ggml.merges: {line!r} does not join two tokens to a third")


def _rebuilt_merges(vocabulary: dict[str, int]) -> Iterator[tuple[str, str]]:
    """Every way to put a token together from two others, tokens by id, longest left piece first."""
    for token in vocabulary:
        for cut in range(len(token) - 1, 0, -1):
            if token[:cut] in vocabulary and token[cut:] in vocabulary:
                yield token[:cut], token[cut:]


def _is_spaces(token: str) -> bool:
    return set(token) == {" "}


def _add_tokens(tokenizer: Tokenizer, file: GgufFile) -> None:
    """Tokens that are found in a text before anything else: control tokens, and those of the vocabulary's makers."""
    tokens, kinds = file.strings("tokenizer.ggml.tokens"), file.integers("tokenizer.ggml.token_type")
    if len(tokens) != len(kinds):
        raise CheckpointError(f"{file.path}: {len(tokens)} tokens have {len(kinds)} types")
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _CONTROL or (kind == _USER_DEFINED and not _is_spaces(token))
        ]
    )
