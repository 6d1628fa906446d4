"""The reference implementation: transformers, always built by from_pretrained, with eager attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor


def save_random(config: Any, directory: Path, seed: int = 0) -> Path:
    """Save a random model of `config`, whose norms and layer scalars are not just ones; return its directory."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(0.7 + 0.6 * torch.rand(buffer.shape, generator=generator))
    model.save_pretrained(directory)
    return directory


def load_reference(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The reference model of a directory."""
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()


def reference_logits(model: Any, tokens: list[int], last: int = 0) -> Tensor:
    """Logits float32 [len(tokens), V] of one sequence, or only those of its `last` tokens."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([tokens]), use_cache=False, logits_to_keep=last).logits[0].float()
    assert logits.isfinite().all()
    return logits
