"""Tokenizers of the two shapes that real models have, small enough to be made in a test."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from peg.text.token_bytes import byte_letters

WORDS = (" the", " cat", "the", "cat", "  ", "12", "你", "好", "你好", "é", "😀", "<", "tool", "call", "\n\n", "END")


def byte_level() -> tokenizers.Tokenizer:
    """The shape of SmolLM2, Llama 3 and Qwen: bytes spelled in letters, one token for each and merges on top.

    Some tokens are half characters, some cross character borders. Added tokens: two special, one plain, one
    whose letters would be other bytes if they were taken for letters.
    """
    letter = {byte: char for char, byte in byte_letters().items()}
    pieces = [letter[byte] for byte in range(256)]
    merges = []
    for word in (*WORDS, "你好 the"):
        spelled = [letter[byte] for byte in word.encode()]
        for end in range(2, len(spelled) + 1):
            joined = "".join(spelled[:end])
            if joined not in pieces:
                pieces.append(joined)
                merges.append((joined[:-1], joined[-1]))
    core = tokenizers.Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, normalized=False) for text in ("<|im_start|>", "<|im_end|>")])
    core.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "｜é｜")])
    return core


def byte_fallback(*, prefix_space: bool = False) -> tokenizers.Tokenizer:
    """The shape of Gemma: `▁` for a space, `<0xNN>` for bytes that no token covers, BOS added to every text.

    With `prefix_space` the shape of Llama 2: a space is put before every text and taken away in decoding.
    """
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    chars = [chr(code) for code in range(0x21, 0x7F)] + ["▁", "é"]
    pieces += chars
    merges = []
    for word in WORDS:
        for end in range(2, len(word) + 1):
            joined = word[:end].replace(" ", "▁")
            if joined not in pieces and all(char in chars for char in joined):
                pieces.append(joined)
                merges.append((joined[:-1], joined[-1]))
    vocab = {piece: i for i, piece in enumerate(pieces)}
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    core = tokenizers.Tokenizer(model)
    spaces = normalizers.Replace(" ", "▁")
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix_space else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix_space else steps)
    core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    core.add_special_tokens([AddedToken(text, normalized=False) for text in ("<pad>", "<eos>", "<bos>", "<unk>")])
    core.add_tokens([AddedToken(text, normalized=False) for text in ("\n\n\n", "<h1>")])
    return core
