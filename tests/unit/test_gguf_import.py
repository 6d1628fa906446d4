"""GGUF files become model directories: every tensor, the config, the tokenizer; what is not known is refused."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file

from peg.checkpoint.directory import open_model_directory
from peg.checkpoint.fields import Fields
from peg.checkpoint.gguf_import import import_gguf
from peg.checkpoint.progress import Silent
from peg.checkpoint.rope import RopeParameters, read_rope
from peg.errors import CheckpointError
from tests.unit.small_gguf import SmallGguf, small_gemma, small_llama

FAMILIES = (small_llama, small_gemma)


@pytest.fixture
def llama() -> SmallGguf:
    return small_llama(np.random.default_rng(0))


@pytest.fixture
def gemma() -> SmallGguf:
    return small_gemma(np.random.default_rng(0))


def imported(file: SmallGguf, folder: Path) -> Path:
    import_gguf(file.write(folder / "file.gguf"), folder / "model", Silent())
    return folder / "model"


def assert_same(directory: Path, file: SmallGguf) -> None:
    tensors = load_file(directory / "model.safetensors")
    assert tensors.keys() == file.expected.keys()
    for name, expected in file.expected.items():
        assert torch.equal(tensors[name], torch.from_numpy(expected.copy()).to(torch.bfloat16)), name


# --- tensors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_arrives(family: Callable[[np.random.Generator], SmallGguf], tmp_path: Path) -> None:
    """Names, shapes and values are the model's: heads in halves again (Llama), norms without their one (Gemma)."""
    file = family(np.random.default_rng(1))
    assert_same(imported(file, tmp_path), file)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16"])
def test_quantised_rows_are_put_in_order_before_they_are_unpacked(kind: str, llama: SmallGguf, tmp_path: Path) -> None:
    """A quantised projection holds what its type keeps, in the model's order of rows."""
    for projection in ("q", "v"):
        name = f"model.layers.0.self_attn.{projection}_proj.weight"
        llama.quantize(f"blk.0.attn_{projection}.weight", name, GGMLQuantizationType[kind])
    assert_same(imported(llama, tmp_path), llama)


def test_memory_is_bounded_by_a_few_rows(llama: SmallGguf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a few rows at a time gives the same tensors as reading them whole."""
    monkeypatch.setattr("peg.checkpoint.gguf_file._CHUNK_ELEMENTS", 100)
    assert_same(imported(llama, tmp_path), llama)


def test_a_head_of_its_own(llama: SmallGguf, tmp_path: Path) -> None:
    """A file with an output tensor is not tied, one without is."""
    assert json.loads((imported(llama, tmp_path) / "config.json").read_text())["tie_word_embeddings"] is True
    llama.tensors["output.weight"] = llama.expected["lm_head.weight"] = llama.tensors["token_embd.weight"] / 2
    (tmp_path / "untied").mkdir()
    directory = imported(llama, tmp_path / "untied")
    assert_same(directory, llama)
    assert json.loads((directory / "config.json").read_text())["tie_word_embeddings"] is False


def test_files_are_readable_by_all(llama: SmallGguf, tmp_path: Path) -> None:
    """The directory and its files have the rights that the user's umask gives."""
    umask = os.umask(0o022)
    try:
        directory = imported(llama, tmp_path)
    finally:
        os.umask(umask)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o755
    assert {stat.S_IMODE(file.stat().st_mode) for file in directory.iterdir()} == {0o644}


# --- config and tokenizer -----------------------------------------------------------------------------------


def test_the_config_of_llama(llama: SmallGguf, tmp_path: Path) -> None:
    """Sizes, the eps as it was before it became fp32, theta, the special ids and the template are the file's."""
    directory = imported(llama, tmp_path)
    model = open_model_directory(directory)
    fields = Fields(model.config)
    assert model.architecture == "LlamaForCausalLM"
    assert (model.dtype, model.eos_token_ids) == ("bfloat16", (2,))
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    assert [fields.integer(name) for name in sizes] == [32, 64, 2, 2, 1]
    assert fields.integer("head_dim") == 16
    assert fields.integer("max_position_embeddings") == 128
    assert fields.integer("vocab_size") == len(llama.expected["model.embed_tokens.weight"])
    assert fields.number("rms_norm_eps") == 1e-5
    assert read_rope(fields) == RopeParameters(theta=100_000.0)
    assert (directory / "chat_template.jinja").read_text() == "{{ messages }}"
    assert json.loads((directory / "generation_config.json").read_text())["bos_token_id"] == 1
    assert json.loads((directory / "tokenizer_config.json").read_text())["eos_token"] == "<end>"


def test_the_config_of_gemma(gemma: SmallGguf, tmp_path: Path) -> None:
    """What the file does not say is supplied: the local theta, the pattern of six, the scale of the queries."""
    gemma.fields |= {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    gemma.fields["tokenizer.ggml.eot_token_id"] = 3
    directory = imported(gemma, tmp_path)
    model = open_model_directory(directory)
    fields = Fields(model.config)
    assert model.architecture == "Gemma3ForCausalLM"
    assert model.eos_token_ids == (1, 3)
    assert fields.strings("layer_types") == ("sliding_attention",) * 5 + ("full_attention", "sliding_attention")
    assert (fields.integer("sliding_window"), fields.integer("query_pre_attn_scalar")) == (512, 256)
    assert fields.text("hidden_activation") == "gelu_pytorch_tanh"
    assert read_rope(fields, "full_attention") == RopeParameters(rope_type="linear", theta=1e6, factor=8.0)
    local = read_rope(fields, "sliding_attention", theta_field="rope_local_base_freq", scaled=False)
    assert local == RopeParameters(theta=1e4)
    assert not (directory / "chat_template.jinja").exists()


def test_the_tokenizer_of_llama(llama: SmallGguf, tmp_path: Path) -> None:
    """Digits are split one by one before spaces join words, and any text comes back."""
    tokenizer = tokenizers.Tokenizer.from_file(str(imported(llama, tmp_path) / "tokenizer.json"))
    assert tokenizer.encode("ab  12").tokens == ["ab", "ĠĠ", "1", "2"]
    assert tokenizer.encode(" ab<end>").tokens == ["Ġab", "<end>"]
    for text in ("中文 と", "😀👩‍👧", "\x00\x1b\x7f\u200b", "a  1\n\t"):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_the_tokenizer_of_gemma(gemma: SmallGguf, tmp_path: Path) -> None:
    """`<bos>` comes first, runs of spaces are one token, merges are found again, other characters become bytes."""
    tokenizer = tokenizers.Tokenizer.from_file(str(imported(gemma, tmp_path) / "tokenizer.json"))
    assert tokenizer.encode("ab  a\n\n<b>").tokens == ["<bos>", "ab", "▁▁", "a", "\n\n", "<b>"]
    assert tokenizer.encode(" abc", add_special_tokens=False).tokens == ["▁ab", "c"]
    assert tokenizer.encode("é", add_special_tokens=False).tokens == ["<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("<bos><b>  中").ids) == "<b>  中"
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    spaces = [("▁", "▁"), ("▁▁", "▁"), ("▁", "▁▁")]
    assert [tuple(merge) for merge in merges] == [
        *spaces,
        ("▁", "a"),
        ("a", "b"),
        ("▁a", "b"),
        ("▁", "ab"),
        ("ab", "c"),
    ]


# --- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("llama.expert_count", 8, "llama.expert_count is 8: peg does not know this field"),
        ("llama.rope.scaling.type", "yarn", 'rope.scaling.type is "yarn"'),
        ("llama.attention.key_length", 8, "key_length is 8: peg supports only 16"),
        ("llama.block_count", 0, "block_count is 0"),
        ("llama.attention.head_count", 4, "blk.1.attn_q.weight: shape [32, 32], must be [64, 32]"),
        ("llama.rope.dimension_count", 2, "blk.0.attn_k.weight: shape [16, 32], must be [2, 32]"),
        ("llama.rope.dimension_count", 15, "heads of 15 have no two halves to rotate"),
        ("llama.block_count", 3, "blk.2.attn_q.weight: missing"),
        ("llama.block_count", 1, "blk.1.attn_q.weight: unknown"),
        ("tokenizer.ggml.pre", "llama-bpe", 'tokenizer.ggml.pre is "llama-bpe"'),
        ("tokenizer.ggml.model", "llama", "tokenizer of model llama"),
        ("tokenizer.ggml.add_bos_token", True, "add_bos_token is true"),
        ("tokenizer.ggml.add_space_prefix", True, "add_space_prefix is true"),
        ("tokenizer.ggml.eos_token_id", 10_000, "eos_token_id is 10000: the vocabulary has"),
        ("tokenizer.ggml.token_type", [1], "have 1 types"),
        ("tokenizer.ggml.merges", ["a zzz"], "'a zzz' does not join two tokens"),
        ("tokenizer.ggml.tokens", ["<unk>", "a", "a"], "token_embd.weight: shape [263, 32], must be [3, 32]"),
    ],
)
def test_what_is_not_known_is_refused(name: str, value: object, message: str, llama: SmallGguf, tmp_path: Path) -> None:
    """A field that may change the computation is refused by its name, and no directory is left behind."""
    llama.fields[name] = value
    with pytest.raises(CheckpointError) as caught:
        imported(llama, tmp_path)
    assert message in str(caught.value)
    assert [file.name for file in tmp_path.iterdir()] == ["file.gguf"]


def test_a_token_that_is_there_twice_is_refused(llama: SmallGguf, tmp_path: Path) -> None:
    """Two ids for one text cannot be told apart."""
    tokens = llama.fields["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    tokens[-1] = tokens[-2]
    with pytest.raises(CheckpointError, match="holds 1 tokens twice"):
        imported(llama, tmp_path)


def test_a_place_that_cannot_be_written_is_refused(llama: SmallGguf, tmp_path: Path) -> None:
    """A file that is not there, or a directory that cannot be made, is told by its name."""
    (tmp_path / "taken").touch()
    path = llama.write(tmp_path / "file.gguf")
    with pytest.raises(CheckpointError, match=r"taken.model: cannot be written"):
        import_gguf(path, tmp_path / "taken" / "model", Silent())
    with pytest.raises(CheckpointError, match=r"absent\.gguf: cannot be read"):
        import_gguf(tmp_path / "absent.gguf", tmp_path / "model", Silent())


def test_another_architecture_is_refused(llama: SmallGguf, tmp_path: Path) -> None:
    """The refusal names the architecture and those that are known."""
    llama.architecture = "mamba"
    with pytest.raises(CheckpointError, match=r'general.architecture is "mamba": peg imports only llama, gemma3'):
        imported(llama, tmp_path)


def test_other_heads_of_gemma_are_refused(gemma: SmallGguf, tmp_path: Path) -> None:
    """The one size with heads of 128 scales its queries by a number that the file does not hold."""
    gemma.fields["gemma3.attention.key_length"] = 128
    with pytest.raises(CheckpointError, match=r"gemma3\.attention\.key_length is 128"):
        imported(gemma, tmp_path)


def test_an_unknown_tensor_type_is_refused(llama: SmallGguf, tmp_path: Path) -> None:
    """A tensor in a type that peg cannot read is refused with its name and the type's."""
    name = "blk.1.ffn_up.weight"
    llama.tensors[name] = llama.tensors[name].astype(np.float64)
    llama.types[name] = GGMLQuantizationType.F64
    with pytest.raises(CheckpointError, match=f"{name} is of type F64"):
        imported(llama, tmp_path)


@pytest.mark.parametrize("kept", [0, 3, 30, 5_000, -1_000, -1])
def test_a_truncated_file_is_refused(kept: int, llama: SmallGguf, tmp_path: Path) -> None:
    """A file that ends early, wherever that is, is refused, and no directory is left behind."""
    path = llama.write(tmp_path / "file.gguf")
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"file\.gguf: not a GGUF file, truncated"):
        import_gguf(path, tmp_path / "model", Silent())
    assert [file.name for file in tmp_path.iterdir()] == ["file.gguf"]


def test_a_text_file_is_refused(tmp_path: Path) -> None:
    """A file of another kind is refused by its name."""
    (tmp_path / "file.gguf").write_text("not a model " * 100)
    with pytest.raises(CheckpointError, match=r"file\.gguf: not a GGUF file"):
        import_gguf(tmp_path / "file.gguf", tmp_path / "model", Silent())


def test_a_directory_that_is_there_is_kept(llama: SmallGguf, tmp_path: Path) -> None:
    """An import never writes over something."""
    (tmp_path / "model").mkdir()
    with pytest.raises(CheckpointError, match="already exists"):
        imported(llama, tmp_path)


def test_an_import_that_stops_leaves_nothing(llama: SmallGguf, tmp_path: Path) -> None:
    """The directory appears only once it is whole: stopped half way, nothing is there."""

    class Stops(Silent):
        def stage(self, name: str, done_bytes: int, total_bytes: int) -> None:
            assert 0 < done_bytes < total_bytes
            raise KeyboardInterrupt

    path = llama.write(tmp_path / "file.gguf")
    with pytest.raises(KeyboardInterrupt):
        import_gguf(path, tmp_path / "model", Stops())
    assert [file.name for file in tmp_path.iterdir()] == ["file.gguf"]
