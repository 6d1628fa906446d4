"""The safetensors files of a model directory, compared with the manifest before a byte of a tensor is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from peg.checkpoint.fields import Fields, read_json
from peg.checkpoint.manifest import Manifest, TensorSpec
from peg.errors import CheckpointError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies. `name` is its name in the file, `dtype` as safetensors spells it."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


def holds_weights(directory: Path) -> bool:
    """Whether there is anything that could be weights, whole or not."""
    return any(directory.glob("*.safetensors*"))


def open_weights(directory: Path, manifest: Manifest) -> Mapping[str, StoredTensor]:
    """Every tensor of the manifest that the files hold, by its name there; skipped ones are left out.

    Reads headers only. Raises CheckpointError with all faults at once: missing and unexpected tensors, wrong shapes
    and dtypes, tensors that are there twice, truncated files, missing shards, an index that does not agree.
    """
    faults: list[str] = []
    found: dict[str, StoredTensor] = {}
    for stored in _stored_tensors(directory, faults):
        name = manifest.canonical(stored.name)
        if name in found:
            faults.append(f"{stored.name}: in {stored.path.name} and in {found[name].path.name} ({found[name].name})")
        elif name is not None:
            found[name] = stored
    specs = manifest.specs
    faults += [f"{spec.name}: missing" for spec in manifest.required if spec.name not in found]
    for name, stored in found.items():
        faults += _differences(stored, specs.get(name))
    if faults:
        raise CheckpointError(f"{directory}: its weights are not what config.json calls for", faults)
    return found


def _stored_tensors(directory: Path, faults: list[str]) -> Iterator[StoredTensor]:
    single, index = directory / _SINGLE, directory / _INDEX
    if single.is_file():
        yield from _headers(single, faults)
    elif index.is_file():
        yield from _sharded(directory, _weight_map(index), faults)
    else:
        faults.append(f"neither {_SINGLE} nor {_INDEX} is there")


def _weight_map(index: Path) -> Mapping[str, str]:
    fields = Fields(read_json(index), str(index)).section("weight_map")
    if fields is None:
        raise CheckpointError(f"{index}: weight_map is missing")
    weight_map = {name: fields.text(name) for name in sorted(fields.names)}
    for name, shard in weight_map.items():
        if Path(shard).name != shard:
            raise fields.error(name, "must be the name of a file beside the index")
    return weight_map


def _sharded(directory: Path, weight_map: Mapping[str, str], faults: list[str]) -> Iterator[StoredTensor]:
    for shard in sorted(set(weight_map.values())):
        if not (directory / shard).is_file():
            faults.append(f"{shard}: the index names this file, it is not there")
            continue
        held = list(_headers(directory / shard, faults))
        yield from held
        names = {stored.name for stored in held}
        missing = [name for name, place in weight_map.items() if place == shard and name not in names]
        faults.extend(f"{name}: not in {shard}, where the index has it" for name in missing if held)


def _headers(path: Path, faults: list[str]) -> Iterator[StoredTensor]:
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  the handle itself cannot be iterated
                header = file.get_slice(name)
                yield StoredTensor(path, name, tuple(header.get_shape()), header.get_dtype())
    except (SafetensorError, OSError) as error:
        faults.append(f"{path.name}: {path.stat().st_size} bytes, truncated or damaged: {error}")


def _differences(stored: StoredTensor, spec: TensorSpec | None) -> Iterator[str]:
    if spec is None:
        yield f"{stored.name}: unexpected"
        return
    if stored.shape != spec.shape:
        yield f"{stored.name}: shape {list(stored.shape)}, must be {list(spec.shape)}"
    if stored.dtype not in spec.dtypes:
        yield f"{stored.name}: dtype {stored.dtype}, must be {' or '.join(spec.dtypes)}"
