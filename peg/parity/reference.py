"""The reference implementation, read like an arm."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peg.errors import ConfigError
from peg.parity.reading import TOP, Reading
from peg.plan import TokenLogprobs

_DTYPES: Mapping[str, torch.dtype] = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
_ROWS = 64  # of logits in fp32 at a time


class Transformers:
    """A model as Hugging Face transformers runs it on the CPU, one prompt at a time, with eager attention.

    It is loaded in its dtype, not converted after loading, which would round what must stay in fp32. `version` is
    transformers' own.
    """

    def __init__(self, model_dir: Path, dtype: str) -> None:
        try:
            import transformers  # noqa: PLC0415 (need not be installed)
        except ImportError as error:
            raise ConfigError("--reference transformers: it is not installed; a golden file does without") from error
        self.version = str(transformers.__version__)
        transformers.utils.logging.disable_progress_bar()
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=_DTYPES[dtype], attn_implementation="eager"
        ).eval()

    def read(self, texts: Iterable[Sequence[int]], new_tokens: int, forbidden_ids: Collection[int]) -> list[Reading]:
        """One text after another; `forbidden_ids` are not picked."""
        return [
            self._read(f"prompt {index}", text, new_tokens, list(forbidden_ids)) for index, text in enumerate(texts)
        ]

    def _read(self, name: str, prompt: Sequence[int], new_tokens: int, forbidden_ids: list[int]) -> Reading:
        """Teacher-forced over the prompt, then greedy with a cache."""
        forbidden = torch.tensor(forbidden_ids, dtype=torch.int64)
        with torch.inference_mode():
            out = self._model(torch.tensor([prompt]), use_cache=True)
            scored = _entries(out.logits[0, :-1], prompt[1:])
            greedy: list[TokenLogprobs] = []
            while len(greedy) < new_tokens:
                logits = out.logits[0, -1:]
                allowed = logits[0].index_fill(0, forbidden, float("-inf"))
                greedy += _entries(logits, [int(allowed.argmax())])  # of equal ones the first
                stored = "cache" if "cache" in out else "past_key_values"  # as transformers 5.17 calls it
                out = self._model(torch.tensor([[greedy[-1].token_id]]), use_cache=True, **{stored: out[stored]})
        return Reading(name, tuple(prompt), tuple(scored), tuple(greedy))


def _entries(logits: Tensor, token_ids: Sequence[int]) -> list[TokenLogprobs]:
    """The logprobs of one token a row of logits [rows, V], as peg's ranks tell them."""
    entries = []
    for first in range(0, len(token_ids), _ROWS):
        rows = logits[first : first + _ROWS].float()
        targets = torch.tensor(token_ids[first : first + _ROWS])
        chosen = rows.gather(1, targets[:, None])
        before = (rows > chosen) | ((rows == chosen) & (torch.arange(rows.shape[1]) < targets[:, None]))
        logsumexp = rows.double().logsumexp(-1, keepdim=True)
        top = rows.topk(min(TOP, rows.shape[1]))
        for target, logprob, place, ids, values in zip(
            targets.tolist(),
            (chosen - logsumexp)[:, 0].tolist(),
            before.sum(-1).tolist(),
            top.indices.tolist(),
            (top.values - logsumexp).tolist(),
            strict=True,
        ):
            ordered = sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0]))
            entries.append(TokenLogprobs(target, logprob, place + 1, tuple(ordered)))
    return entries
