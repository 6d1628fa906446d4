"""`peg check`: what running a model would take, told before anything is allocated."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

import click

from peg.config import EngineConfig
from peg.errors import ConfigError
from peg.ranks.blueprint import draw_blueprint
from peg.ranks.machine import free_memory_bytes, kv_budget_bytes


def check(config: EngineConfig, *, as_json: bool) -> None:
    """Write the plan to standard output. Raises UsageError with every fault, or where memory is too small."""
    plan = _plan(config)
    click.echo(json.dumps(plan, indent=2) if as_json else "\n".join(_told(plan)))
    if plan["weight_bytes"] + plan["kv_bytes"] > plan["free_memory_bytes"]:
        raise ConfigError(f"{config.model}: weights and KV cache do not fit into free memory")


def _plan(config: EngineConfig) -> dict[str, Any]:
    """The plan as JSON has it; reads no weights."""
    blueprint = draw_blueprint(config)
    free = free_memory_bytes()
    budget = config.kv_cache_memory_bytes or kv_budget_bytes(config.tensor_parallel_size)
    pools = blueprint.capacities(budget)
    return {
        "model": config.model,
        "model_dir": str(config.model_dir),
        "architecture": blueprint.directory.architecture,
        "tensors": None if blueprint.stored is None else len(blueprint.stored),
        "parameters": blueprint.parameters,
        "dtype": blueprint.dtype,
        "ranks": blueprint.world_size,
        "max_model_len": blueprint.max_model_len,
        "max_num_seqs": blueprint.max_num_seqs,
        "max_num_batched_tokens": blueprint.max_num_batched_tokens,
        "block_size": blueprint.block_size,
        "weight_bytes": blueprint.parameters * blueprint.torch_dtype.itemsize,
        "kv_budget_bytes_per_rank": budget,
        "kv_bytes": blueprint.kv_bytes(pools) * blueprint.world_size,
        "kv_groups": [
            {"kind": type(pool.group).__name__, **asdict(pool.group), "num_blocks": pool.num_blocks}
            | {"bytes_per_block": blueprint.kv_bytes([replace(pool, num_blocks=1)])}
            for pool in pools
        ],
        "free_memory_bytes": free,
    }


def _told(plan: Mapping[str, Any]) -> Iterator[str]:
    """The plan line by line for people, with its arithmetic."""
    yield f"{plan['model']}: {plan['architecture']} in {plan['model_dir']}"
    yield f"tensors      {plan['tensors'] or 'not looked for: the weights are random'}"
    yield f"weights      {plan['parameters']:,} parameters in {plan['dtype']}: {_mib(plan['weight_bytes'])}"
    yield f"ranks        {plan['ranks']} on the CPU"
    yield (
        f"limits       context {plan['max_model_len']} tokens, {plan['max_num_seqs']} sequences at a time, "
        f"{plan['max_num_batched_tokens']} tokens in one step"
    )
    for group in plan["kv_groups"]:
        window = f", window {group['window']}" if "window" in group else ""
        yield (
            f"KV cache     each rank: {group['kind']}, {len(group['layers'])} layers, {group['kv_heads']} heads of "
            f"{group['head_dim']}{window}: {group['num_blocks']} blocks of {plan['block_size']} tokens, "
            f"{group['bytes_per_block']:,} bytes each, make {_mib(group['num_blocks'] * group['bytes_per_block'])}"
        )
    yield f"budget       {_mib(plan['kv_budget_bytes_per_rank'])} of KV cache on each rank"
    yield f"memory       {_mib(plan['weight_bytes'] + plan['kv_bytes'])} of {_mib(plan['free_memory_bytes'])} free"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):,.1f} MiB"
