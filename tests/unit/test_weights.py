"""Safetensors files against a manifest, and what each rank reads of them."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from safetensors import torch as safetensors_torch
from torch import Tensor

from peg.checkpoint.dummy import DummySource
from peg.checkpoint.manifest import Manifest, TensorSpec
from peg.checkpoint.reader import ShardReader
from peg.checkpoint.source import Placement, TensorSource, shard_size
from peg.checkpoint.weights import open_weights
from peg.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
A = torch.arange(70, dtype=torch.float32).view(10, 7)
B = torch.arange(24, dtype=torch.float32).view(2, 3, 4) + 100
MANIFEST = Manifest(required=(TensorSpec("a", (10, 7)), TensorSpec("b", (2, 3, 4))), skipped_prefixes=("vision.",))


def save_file(tensors: dict[str, Tensor], path: Path) -> None:
    safetensors_torch.save_file({name: tensor.clone() for name, tensor in tensors.items()}, path)


def sharded(directory: Path, shards: dict[str, dict[str, Tensor]], weight_map: dict[str, str] | None = None) -> None:
    for name, tensors in shards.items():
        save_file(tensors, directory / name)
    placed = {tensor: shard for shard, tensors in shards.items() for tensor in tensors}
    (directory / INDEX).write_text(json.dumps({"weight_map": placed if weight_map is None else weight_map}))


def faults(directory: Path, manifest: Manifest = MANIFEST) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        open_weights(directory, manifest)
    return caught.value.faults


def placement(rank: int, world_size: int, dtype: torch.dtype = torch.float32) -> Placement:
    return Placement(rank, world_size, dtype, torch.device("cpu"))


# --- the manifest -------------------------------------------------------------------------------------------


def test_a_single_file_and_shards_hold_the_same(tmp_path: Path) -> None:
    """Both layouts are found, skipped prefixes are left out, and a tensor's place is told."""
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    save_file({"a": A, "b": B, "vision.x": A}, tmp_path / "one" / SINGLE)
    sharded(tmp_path / "two", {"s1": {"a": A, "vision.x": B}, "s2": {"b": B}})
    for directory in ("one", "two"):
        found = open_weights(tmp_path / directory, MANIFEST)
        assert {name: stored.shape for name, stored in found.items()} == {"a": (10, 7), "b": (2, 3, 4)}
    assert open_weights(tmp_path / "two", MANIFEST)["b"].path == tmp_path / "two" / "s2"


def test_all_faults_are_one_error(tmp_path: Path) -> None:
    """Missing, unexpected, wrong shape and wrong dtype are listed together, each by name."""
    manifest = Manifest(
        required=(TensorSpec("a", (10, 8), ("BF16", "F16")), TensorSpec("b", (2, 3, 4)), TensorSpec("gone", (1,))),
        optional=(TensorSpec("maybe", (3,)), TensorSpec("absent", (4,))),
    )
    save_file({"a": A, "b": B, "extra": B, "maybe": torch.zeros(2), "vision.x": A}, tmp_path / SINGLE)
    assert sorted(faults(tmp_path, manifest)) == [
        "a: dtype F32, must be BF16 or F16",
        "a: shape [10, 7], must be [10, 8]",
        "extra: unexpected",
        "gone: missing",
        "maybe: shape [2], must be [3]",
        "vision.x: unexpected",
    ]


@pytest.mark.parametrize("cut_bytes", [1, 200, 10_000])
def test_a_truncated_file(tmp_path: Path, cut_bytes: int) -> None:
    """A file that ends early, in the data or in the header, is told by its name and size."""
    save_file({"a": A, "b": B}, tmp_path / SINGLE)
    whole = (tmp_path / SINGLE).read_bytes()
    kept = whole[: max(0, len(whole) - cut_bytes)]
    (tmp_path / SINGLE).write_bytes(kept)
    assert any(f"{SINGLE}: {len(kept)} bytes, truncated or damaged" in fault for fault in faults(tmp_path))


def test_an_index_that_does_not_agree(tmp_path: Path) -> None:
    """A missing shard, a tensor that is not in its shard and one that is in two shards are all told."""
    shards = {"s1": {"a": A}, "s2": {"a": A, "b": B}}
    sharded(tmp_path, shards, {"a": "s1", "b": "s2", "c": "s2", "d": "s3"})
    assert set(faults(tmp_path)) == {
        "s3: the index names this file, it is not there",
        "c: not in s2, where the index has it",
        "a: in s2 and in s1 (a)",
    }


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd", "sub/x"])
def test_an_index_cannot_leave_its_directory(tmp_path: Path, shard: str) -> None:
    """A shard is a file beside the index, nothing else."""
    sharded(tmp_path, {}, {"a": shard})
    with pytest.raises(CheckpointError, match="must be the name of a file beside the index"):
        open_weights(tmp_path, MANIFEST)


def test_no_weights_at_all(tmp_path: Path) -> None:
    """A directory without safetensors says so, and an index without a map does too."""
    assert faults(tmp_path)[0] == f"neither {SINGLE} nor {INDEX} is there"
    (tmp_path / INDEX).write_text("{}")
    with pytest.raises(CheckpointError, match="weight_map is missing"):
        open_weights(tmp_path, MANIFEST)


def test_prefixes_with_two_spellings(tmp_path: Path) -> None:
    """A renamed prefix is found under its name here, read under its own, and may not be there twice."""
    manifest = Manifest(
        required=(TensorSpec("model.a", (10, 7)),),
        renamed_prefixes=(("model.language_model.", "model."), ("language_model.model.", "model.")),
    )
    for spelled in ("model.a", "model.language_model.a", "language_model.model.a"):
        save_file({spelled: A}, tmp_path / SINGLE)
        reader = ShardReader(open_weights(tmp_path, manifest), placement(0, 1))
        assert torch.equal(reader.whole("model.a"), A)
    save_file({"model.a": A, "model.language_model.a": A}, tmp_path / SINGLE)
    assert "in model.safetensors and in model.safetensors" in faults(tmp_path, manifest)[0]


# --- what a rank reads --------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 12])
@pytest.mark.parametrize(("name", "whole", "dim"), [("a", A, 0), ("a", A, 1), ("b", B, 0), ("b", B, 1), ("b", B, 2)])
def test_shards_are_the_whole_with_zeros_behind(
    tmp_path: Path, world_size: int, name: str, whole: Tensor, dim: int
) -> None:
    """All ranks' shards in a row are the tensor, then zeros up to the next multiple, also with ranks left over."""
    save_file({"a": A, "b": B}, tmp_path / SINGLE)
    stored = open_weights(tmp_path, MANIFEST)
    shards = [ShardReader(stored, placement(rank, world_size)).shard(name, dim) for rank in range(world_size)]
    size = whole.shape[dim]
    assert {shard.shape[dim] for shard in shards} == {shard_size(size, world_size)}
    assert all(shard.is_contiguous() for shard in shards)
    joined = torch.cat(shards, dim)
    assert torch.equal(joined.narrow(dim, 0, size), whole)
    assert not joined.narrow(dim, size, joined.shape[dim] - size).any()


def test_the_padded_widths_of_nine_ranks() -> None:
    """The widths that the design names: 1536 becomes 9 × 171 = 1539, 49152 becomes 9 × 5462 = 49158."""
    assert (9 * shard_size(1536, 9), 9 * shard_size(49152, 9)) == (1539, 49158)


def test_a_reader_reads_its_slice_only(tmp_path: Path) -> None:
    """Bytes are counted as stored, a part is exact, dtypes are cast, and what is returned is not the file's memory."""
    save_file({"a": A.to(torch.bfloat16), "b": B}, tmp_path / SINGLE)
    reader = ShardReader(open_weights(tmp_path, MANIFEST), placement(1, 5))
    part = reader.part("a", 0, 3, 5)
    assert torch.equal(part, A[3:5])
    assert reader.bytes_read == 2 * 7 * 2
    assert torch.equal(reader.shard("a", 0, torch.bfloat16), A[2:4].to(torch.bfloat16))
    assert reader.bytes_read == 2 * 2 * 7 * 2
    part.zero_()
    assert torch.equal(reader.part("a", 0, 3, 5), A[3:5])
    assert (reader.has("a"), reader.has("c"), reader.shape("b")) == (True, False, (2, 3, 4))


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (0, 11), (3, 3), (9, 8)])
def test_a_part_outside_the_tensor_is_a_bug(tmp_path: Path, start: int, stop: int) -> None:
    """Heads that are not there are never read as zeros."""
    save_file({"a": A, "b": B}, tmp_path / SINGLE)
    reader = ShardReader(open_weights(tmp_path, MANIFEST), placement(0, 1))
    with pytest.raises(AssertionError, match=r"a: \["):
        reader.part("a", 0, start, stop)


def test_readers_on_many_threads(tmp_path: Path) -> None:
    """Each rank's thread has its own reader on the same files, and gets its own slices."""
    big = torch.randn(64, 33, generator=torch.Generator().manual_seed(0))
    save_file({"a": big}, tmp_path / SINGLE)
    stored = open_weights(tmp_path, Manifest((TensorSpec("a", (64, 33)),)))
    shards: dict[int, list[Tensor]] = {}

    def read(rank: int) -> None:
        reader = ShardReader(stored, placement(rank, 4))
        shards[rank] = [reader.shard("a", 0) for _ in range(50)]

    threads = [threading.Thread(target=read, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(4):
        assert all(torch.equal(shard, big[16 * rank : 16 * rank + 16]) for shard in shards[rank])


# --- random weights -----------------------------------------------------------------------------------------

LARGE = Manifest((TensorSpec("w", (210, 130)), TensorSpec("v", (210, 130)), TensorSpec("e", (3, 6, 5))))


def joined(sources: list[TensorSource], name: str, dim: int) -> Tensor:
    return torch.cat([source.shard(name, dim) for source in sources], dim)


@pytest.mark.parametrize(("name", "dim"), [("w", 0), ("w", 1), ("e", 0), ("e", 1), ("e", 2)])
def test_random_weights_do_not_depend_on_the_world_size(name: str, dim: int) -> None:
    """At every world size the ranks hold slices of the same tensor, padded with zeros like a file's."""
    whole = DummySource(LARGE, 5, placement(0, 1)).whole(name)
    for world_size in (2, 3, 4):
        ranks: list[TensorSource] = [DummySource(LARGE, 5, placement(rank, world_size)) for rank in range(world_size)]
        padded = joined(ranks, name, dim)
        assert torch.equal(padded.narrow(dim, 0, whole.shape[dim]), whole)
        assert not padded.narrow(dim, whole.shape[dim], padded.shape[dim] - whole.shape[dim]).any()


def test_random_weights_are_about_normal() -> None:
    """Mean 0, deviation 0.02, neighbours unrelated; another name or seed gives another tensor, the same the same."""
    source = DummySource(LARGE, 5, placement(0, 1))
    weights = source.whole("w")
    assert abs(float(weights.mean())) < 0.0005
    assert abs(float(weights.std()) - 0.02) < 0.0005
    assert 0.06 < float(weights.abs().max()) < 0.08
    for left, right in ((weights[1:], weights[:-1]), (weights[:, 1:], weights[:, :-1]), (weights, source.whole("v"))):
        assert abs(float((left * right).mean())) < 0.02 * 0.02 * 0.03
    assert torch.equal(DummySource(LARGE, 5, placement(0, 1)).whole("w"), weights)
    assert not torch.equal(DummySource(LARGE, 6, placement(0, 1)).whole("w"), weights)


def test_random_norms_let_their_layers_speak() -> None:
    """What multiplies a whole layer is about one, unless the family stores what is added to one."""
    norms = (TensorSpec("a.norm.weight", (4096,)), TensorSpec("a.layer_scalar", (4096,)))
    near_one = DummySource(Manifest(norms), 5, placement(0, 1))
    near_zero = DummySource(Manifest(norms, means=()), 5, placement(0, 1))
    for spec in norms:
        assert abs(float(near_one.whole(spec.name).mean()) - 1) < 0.002
        assert torch.allclose(near_one.whole(spec.name) - 1, near_zero.whole(spec.name), atol=1e-6)


def test_random_weights_of_what_must_be_there() -> None:
    """Optional tensors are absent, so that a model takes the path it takes without them."""
    source = DummySource(Manifest((TensorSpec("a", (2,)),), optional=(TensorSpec("b", (2,)),)), 0, placement(0, 1))
    assert (source.has("a"), source.has("b")) == (True, False)
    assert source.shape("a") == (2,)
