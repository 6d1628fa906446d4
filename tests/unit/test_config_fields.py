"""Config files are read strictly: fields, rope parameters, the model directory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from peg.checkpoint.directory import ModelDirectory, open_model_directory
from peg.checkpoint.fields import Fields, read_json
from peg.checkpoint.rope import RopeParameters, read_rope
from peg.errors import CheckpointError

LLAMA3 = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}


def test_fields_read_what_they_say() -> None:
    """Each reader returns a good value as its type, and its default where the field is absent or null."""
    fields = Fields({"a": 3, "b": 0.5, "c": True, "d": "x", "e": ["y"], "f": {"g": 1}, "h": [2, 5], "null": None})
    assert fields.integer("a") == 3
    assert (fields.number("b"), fields.number("a")) == (0.5, 3.0)
    assert fields.boolean("c") is True
    assert fields.text("d") == "x"
    assert fields.strings("e") == ("y",)
    assert fields.token_ids("h") == (2, 5)
    assert fields.token_ids("a") == (3,)
    section = fields.section("f")
    assert section is not None
    assert section.integer("g") == 1
    assert fields.names == set("abcdefh")
    assert fields.integer("null", default=7) == 7
    assert fields.boolean("absent", default=False) is False
    assert (fields.optional_integer("null"), fields.optional_number("absent"), fields.strings("null")) == (None,) * 3
    assert (fields.section("null"), fields.token_ids("null")) == (None, ())


WRONG: tuple[tuple[Callable[[Fields], object], object, str], ...] = (
    (lambda fields: fields.integer("x"), True, "an integer of at least 1"),
    (lambda fields: fields.integer("x"), 2.0, "an integer of at least 1"),
    (lambda fields: fields.integer("x"), "2", "an integer of at least 1"),
    (lambda fields: fields.integer("x"), 0, "an integer of at least 1"),
    (lambda fields: fields.integer("x", minimum=0), -1, "an integer of at least 0"),
    (lambda fields: fields.number("x"), True, "a finite number above zero"),
    (lambda fields: fields.number("x"), 0, "a finite number above zero"),
    (lambda fields: fields.number("x"), float("inf"), "a finite number above zero"),
    (lambda fields: fields.number("x"), float("nan"), "a finite number above zero"),
    (lambda fields: fields.number("x"), 10**400, "a finite number above zero"),
    (lambda fields: fields.number("x"), "1", "a finite number above zero"),
    (lambda fields: fields.boolean("x", default=True), 1, "true or false"),
    (lambda fields: fields.text("x", default=""), 1, "a string"),
    (lambda fields: fields.strings("x"), "ab", "a list of strings"),
    (lambda fields: fields.strings("x"), ["a", 1], "a list of strings"),
    (lambda fields: fields.token_ids("x"), [1, True], "token id"),
    (lambda fields: fields.token_ids("x"), -1, "token id"),
    (lambda fields: fields.section("x"), [], "an object"),
    (lambda fields: fields.expect("x", False), True, "supports only false"),
    (lambda fields: fields.expect("x", 1), True, "supports only 1"),
    (lambda fields: fields.expect("x"), "anything", "supports only null"),
)


@pytest.mark.parametrize(("read", "value", "rule"), WRONG)
def test_a_wrong_value_is_refused_by_name(read: Callable[[Fields], object], value: object, rule: str) -> None:
    """The refusal names the file, the whole path of the field, the value and the rule."""
    with pytest.raises(CheckpointError) as caught:
        read(Fields({"x": value}, "some.json", "outer."))
    assert str(caught.value).startswith(f"some.json: outer.x is {json.dumps(value)[:100]}")
    assert rule in str(caught.value)


def test_a_missing_field_is_refused_by_name() -> None:
    """A field without a default must be there."""
    with pytest.raises(CheckpointError, match=r"config\.json: hidden_size is missing"):
        Fields({"hidden_size": None}).integer("hidden_size", "n_embd")


def test_a_nested_field_is_named_with_its_whole_path() -> None:
    """The refusal of a field in an object in an object names both."""
    inner = Fields({"a": {"b": {"c": 0}}}).section("a")
    assert inner is not None
    innermost = inner.section("b")
    assert innermost is not None
    with pytest.raises(CheckpointError, match=r"config\.json: a\.b\.c is 0"):
        innermost.integer("c")


def test_expect_takes_absent_and_allowed_values() -> None:
    """A field that is absent, null or as expected passes; 1 and 1.0 are the same JSON number."""
    fields = Fields({"act": "silu", "bias": False, "factor": 1.0, "none": None})
    fields.expect("act", "gelu", "silu")
    fields.expect("bias", False)
    fields.expect("factor", 1)
    fields.expect("none", "x")
    fields.expect("absent", "x")


def test_two_spellings_must_agree() -> None:
    """Either spelling is read, both may be there, and a contradiction is refused."""
    assert Fields({"dtype": "a"}).text("torch_dtype", "dtype") == "a"
    assert Fields({"dtype": "a", "torch_dtype": "a"}).text("torch_dtype", "dtype") == "a"
    with pytest.raises(CheckpointError, match='dtype is "a": torch_dtype means the same and is "b"'):
        Fields({"dtype": "a", "torch_dtype": "b"}).text("torch_dtype", "dtype")


@pytest.mark.parametrize("text", ["[]", "{", "\xff"])
def test_a_file_without_an_object_is_refused(tmp_path: Path, text: str) -> None:
    """A file that is not a JSON object is an error that names the file."""
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config\.json: "):
        read_json(path)


# --- rope ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (None, RopeParameters(theta=500.0)),
        ({"rope_type": "default"}, RopeParameters(theta=500.0)),
        ({"type": "linear", "factor": 8}, RopeParameters(rope_type="linear", theta=500.0, factor=8.0)),
        (
            {"rope_type": "llama3", **LLAMA3},
            RopeParameters(
                rope_type="llama3",
                theta=500.0,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=8192,
            ),
        ),
    ],
)
def test_both_spellings_of_rope_are_one(scaling: dict[str, object] | None, expected: RopeParameters) -> None:
    """rope_theta with rope_scaling and rope_parameters give the same, and may stand side by side."""
    older = {"rope_theta": 500, "rope_scaling": scaling}
    newer = {"rope_parameters": {"rope_theta": 500, **(scaling or {})}}
    assert read_rope(Fields(older)) == expected
    assert read_rope(Fields(newer)) == expected
    assert read_rope(Fields({**older, **newer})) == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, 'rope_scaling.rope_type is "yarn".*linear, llama3'),
        ({"rope_scaling": {"type": "dynamic"}}, 'rope_scaling.type is "dynamic"'),
        ({"rope_parameters": {"rope_type": "proportional"}}, 'rope_parameters.rope_type is "proportional"'),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5: not a parameter"),
        ({"rope_parameters": {"rope_type": "default", "factor": 2}}, "factor is 2: not a parameter"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {"type": "llama3", **LLAMA3, "high_freq_factor": 1}}, "must be above low_freq_factor"),
        ({"rope_parameters": {"rope_theta": 1.0}, "rope_theta": 2.0}, "rope_theta is 2.0"),
        ({"rope_parameters": {}, "rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling is .*differs"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "full_attention is .*: not a parameter"),
    ],
)
def test_other_rope_is_refused(config: dict[str, object], message: str) -> None:
    """Unknown types, unknown keys, missing keys and contradictions are refused by name."""
    with pytest.raises(CheckpointError, match=message):
        read_rope(Fields(config))


def test_rope_of_each_kind_of_layer() -> None:
    """Nested rope_parameters, and the older pair of fields in which scaling is for one kind only, agree."""
    newer = Fields(
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default"},
            }
        }
    )
    older = Fields({"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    for fields in (newer, older):
        full = read_rope(fields, "full_attention", default_theta=1e6)
        local = read_rope(fields, "sliding_attention", theta_field="rope_local_base_freq", scaled=False)
        assert full == RopeParameters(rope_type="linear", theta=1e6, factor=8.0)
        assert local == RopeParameters(theta=1e4)
    with pytest.raises(CheckpointError, match=r"rope_parameters\.other is null: .*required"):
        read_rope(newer, "other")


# --- the directory ------------------------------------------------------------------------------------------


def directory(path: Path, config: dict[str, object], generation: object = None) -> ModelDirectory:
    (path / "config.json").write_text(json.dumps({"architectures": ["A"], **config}))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return open_model_directory(path)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 1}, {"eos_token_id": [1, 106]}, (1, 106)),
        ({"eos_token_id": [1, 106]}, {"eos_token_id": None}, (1, 106)),
        ({"eos_token_id": 0}, None, (0,)),
        ({"text_config": {"eos_token_id": 3}}, {}, (3,)),
        ({}, None, ()),
    ],
)
def test_end_of_sequence_ids(
    tmp_path: Path, config: dict[str, object], generation: object, expected: tuple[int, ...]
) -> None:
    """generation_config.json decides, then config.json, then its text part; one id or a list."""
    assert directory(tmp_path, config, generation).eos_token_ids == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float32"}, "float32"),
        ({"torch_dtype": "float32", "text_config": {"dtype": "bfloat16"}}, "bfloat16"),
    ],
)
def test_declared_dtype(tmp_path: Path, config: dict[str, object], expected: str) -> None:
    """Both spellings are read, and a text part's own comes first."""
    assert directory(tmp_path, config).dtype == expected


@pytest.mark.parametrize("config", [{}, {"dtype": "float64"}])
def test_a_dtype_that_is_not_there_or_unknown(tmp_path: Path, config: dict[str, object]) -> None:
    """A missing or unknown dtype is refused when it is asked for."""
    with pytest.raises(CheckpointError, match="dtype"):
        _ = directory(tmp_path, config).dtype


def test_the_digest_is_of_the_config(tmp_path: Path) -> None:
    """Two configs that differ have different digests."""
    first = directory(tmp_path, {"x": 1})
    second = directory(tmp_path, {"x": 2})
    assert first.architecture == "A"
    assert first.digest != second.digest


@pytest.mark.parametrize("architectures", [[], ["A", "B"], None, "A"])
def test_one_architecture(tmp_path: Path, architectures: object) -> None:
    """A config that does not name exactly one architecture is refused."""
    with pytest.raises(CheckpointError, match="architectures"):
        directory(tmp_path, {"architectures": architectures})


def test_a_directory_without_config(tmp_path: Path) -> None:
    """A directory that is no model directory is refused by its path."""
    with pytest.raises(CheckpointError, match=f"{tmp_path}: not a model directory"):
        open_model_directory(tmp_path)
