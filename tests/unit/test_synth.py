"""Synthetic checkpoints: every family in every layout, the same bytes each time, read by peg's own strict loader."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import tokenizers
from safetensors.torch import load_file

from peg.checkpoint.directory import open_model_directory
from peg.checkpoint.synth_config import PREFIXES, RECIPES, SPELLINGS, SynthOptions
from peg.checkpoint.weights import open_weights
from peg.commands.flags import synth_flags
from peg.commands.synth import synth
from peg.errors import CheckpointError, ConfigError
from peg.models.registry import find_family
from peg.text.chat import ChatTemplate
from peg.text.tokenizer import Tokenizer

LEGAL = {
    "llama": PREFIXES[:1],
    "qwen3": PREFIXES[:1],
    "gemma3": PREFIXES,
    **dict.fromkeys(("gemma4-12b", "gemma4-31b", "gemma4-e2b", "gemma4-e4b"), PREFIXES[:2]),
}


def digest(directory: Path) -> str:
    whole = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        whole.update(path.name.encode() + path.read_bytes())
    return whole.hexdigest()


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(("family", "prefix"), [(family, prefix) for family in LEGAL for prefix in LEGAL[family]])
def test_every_layout_is_what_its_own_config_calls_for(family: str, prefix: str, spelling: str, tmp_path: Path) -> None:
    """The strict loader finds each tensor of the manifest, in shards and whole, under the prefix that was asked for."""
    for shards in (1, 3):
        path = tmp_path / str(shards)
        synth(SynthOptions(family=family, prefix=prefix, spelling=spelling, shards=shards), path)
        directory = open_model_directory(path)
        found = find_family(directory.architecture)
        manifest = found.manifest(found.parse(directory.config))
        stored = open_weights(path, manifest)
        assert set(stored) == {spec.name for spec in manifest.required}
        assert stored["model.embed_tokens.weight"].name == f"{prefix}embed_tokens.weight"
        assert {tensor.dtype for tensor in stored.values()} == {"BF16"}
        assert len({tensor.path for tensor in stored.values()}) == shards
        assert directory.dtype == "bfloat16"
        assert len(directory.eos_token_ids) == len(set(directory.eos_token_ids)) > 1


def test_both_spellings_of_a_config_mean_the_same(tmp_path: Path) -> None:
    """In each family the fields differ and the parsed config does not."""
    for family in RECIPES:
        parsed, fields = [], []
        for spelling in SPELLINGS:
            synth(SynthOptions(family=family, spelling=spelling), path := tmp_path / f"{family}-{spelling}")
            directory = open_model_directory(path)
            parsed.append(find_family(directory.architecture).parse(directory.config))
            fields.append(set(directory.config))
        assert parsed[0] == parsed[1]
        assert fields[0] != fields[1]


def test_same_options_same_bytes(tmp_path: Path) -> None:
    """Every file is the same when it is made again; with another seed the weights are others, the config is not."""
    options = SynthOptions(family="gemma4-e4b", shards=2)
    for name in ("a", "b"):
        synth(options, tmp_path / name)
    assert digest(tmp_path / "a") == digest(tmp_path / "b")
    synth(SynthOptions(family="gemma4-e4b", shards=2, seed=1), tmp_path / "c")
    assert digest(tmp_path / "c") != digest(tmp_path / "a")
    assert (tmp_path / "c" / "config.json").read_text() == (tmp_path / "a" / "config.json").read_text()


def test_sizes_are_what_was_asked_for(tmp_path: Path) -> None:
    """Layers, hidden size, vocabulary, window and dtype reach config and weights."""
    options = SynthOptions(
        family="gemma3", layers=3, hidden_size=32, vocab_size=1000, window=5, dtype="float32", prefix=PREFIXES[1]
    )
    synth(options, tmp_path / "m")
    text = json.loads((tmp_path / "m" / "config.json").read_text())["text_config"]
    assert (text["num_hidden_layers"], text["sliding_window"]) == (3, 5)
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    embedding = tensors["model.language_model.embed_tokens.weight"]
    assert (tuple(embedding.shape), str(embedding.dtype)) == ((1000, 32), "torch.float32")
    assert any(name.startswith("model.vision_tower.") for name in tensors)
    assert (tmp_path / "m" / "model.safetensors").stat().st_mode & 0o044 == 0o044


@pytest.mark.parametrize("family", RECIPES)
def test_text_goes_in_and_out(family: str, tmp_path: Path) -> None:
    """Any text survives the tokenizer, common words are one token, the template writes turns the family's way."""
    synth(SynthOptions(family=family), tmp_path / "m")
    tokenizer = Tokenizer.load(tmp_path / "m")
    for text in ("the water of 1969,\n\n  你好 é 😀", "<no special> token"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(" the water")) == 2
    conversation = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    rendered = ChatTemplate.load(tmp_path / "m").render([*conversation, {"role": "user", "content": "the"}])
    starts = {"llama": "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"}
    starts |= {"qwen3": "<|im_start|>user\nhi<|im_end|>\n", "gemma3": "<bos><start_of_turn>user\nhi<end_of_turn>\n"}
    assert rendered.startswith(starts.get(family, "<bos><|turn>user\nhi<turn|>\n"))
    ids = tokenizer.encode(rendered)
    config = open_model_directory(tmp_path / "m")
    assert sum(token_id in config.eos_token_ids for token_id in ids) == 3
    core = tokenizers.Tokenizer.from_file(str(tmp_path / "m" / "tokenizer.json"))
    assert core.get_vocab_size() == config.config["vocab_size"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"family": "bert"}, "FAMILY bert: must be one of llama, qwen3"),
        ({"family": "llama", "hidden_size": 40}, "--hidden-size 40: must be a multiple of 16"),
        ({"family": "gemma4-e2b", "layers": 2}, "--layers 2: gemma4-e2b has at least 3"),
        ({"family": "qwen3", "prefix": PREFIXES[1]}, "all files of qwen3 have model."),
        ({"family": "gemma4-31b", "prefix": PREFIXES[2]}, "no files of gemma4-31b have it"),
        ({"family": "llama", "vocab_size": 100}, "--vocab-size 100: the tokenizer has"),
        ({"family": "llama", "shards": 99}, "--shards 99: there are"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, object], told: str, tmp_path: Path) -> None:
    """The message names the flag, its value and the limit; nothing is written."""
    with pytest.raises(ConfigError, match=told):
        synth(SynthOptions(**options), tmp_path / "m")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    """A directory that is there already is left as it is."""
    (tmp_path / "m").mkdir()
    with pytest.raises(CheckpointError, match="already exists"):
        synth(SynthOptions(family="llama"), tmp_path / "m")


def test_flags_offer_what_there_is() -> None:
    """The command line's choices, written down where nothing heavy is imported, are those of the options."""
    command = synth_flags(lambda: None)
    choices = {param.name: tuple(getattr(param.type, "choices", ())) for param in command.__click_params__}
    assert choices["prefix"] == PREFIXES
    assert choices["spelling"] == SPELLINGS
    assert {param.name for param in command.__click_params__} <= set(SynthOptions.__dataclass_fields__)
