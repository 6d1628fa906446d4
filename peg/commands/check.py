"""`peg check`: what running a model would take, told before anything is allocated."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

import click

from peg.checkpoint.weights import holds_weights
from peg.config import EngineConfig
from peg.errors import ConfigError
from peg.ranks.blueprint import Blueprint, draw_blueprint
from peg.ranks.machine import free_memory_bytes, kv_budget_bytes


def check(config: EngineConfig, *, as_json: bool) -> None:
    """Write the plan to standard output, and what keeps it from running on this machine to standard error.

    Raises UsageError, with every fault, where the checkpoint or the world size is refused.
    """
    bare = config.load_format != "dummy" and not holds_weights(config.model_dir)
    blueprint = draw_blueprint(replace(config, load_format="dummy") if bare else config)
    plan = _plan(config, blueprint)
    lacking = ["no weights are here, so only the config was checked"] if bare else []
    if config.devices == ("cpu",) or config.kv_cache_memory_bytes is not None:
        lacking += _fill_pools(plan, config, blueprint)
    click.echo(json.dumps(plan, indent=2) if as_json else "\n".join(_told(plan)))
    for reason in lacking:
        click.echo(f"{config.model}: {reason}", err=True)


def _plan(config: EngineConfig, blueprint: Blueprint) -> dict[str, Any]:
    """What does not depend on the machine, as JSON has it; reads no weights."""
    dtype_bytes = blueprint.torch_dtype.itemsize
    within, beyond = (blueprint.kv_bytes_per_token(beyond_window=beyond) for beyond in (False, True))
    return {
        "model": config.model,
        "model_dir": str(config.model_dir),
        "architecture": blueprint.directory.architecture,
        "tensors": None if blueprint.stored is None else len(blueprint.stored),
        "parameters": blueprint.parameters,
        "dtype": blueprint.dtype,
        "dtype_bytes": dtype_bytes,
        "weight_bytes": blueprint.parameters * dtype_bytes,
        "world_size": blueprint.world_size,
        "ranks": [
            {
                "rank": rank,
                "weight_bytes": blueprint.rank_weight_bytes(rank),
                "kv_bytes_per_token": within,
                "kv_bytes_per_token_beyond_window": beyond,
            }
            for rank in range(blueprint.world_size)
        ],
        "kv_groups": [{"kind": type(group).__name__, **asdict(group)} for group in blueprint.groups],
        "max_model_len": blueprint.max_model_len,
        "max_num_seqs": blueprint.max_num_seqs,
        "max_num_batched_tokens": blueprint.max_num_batched_tokens,
        "block_size": blueprint.block_size,
    }


def _fill_pools(plan: dict[str, Any], config: EngineConfig, blueprint: Blueprint) -> Iterator[str]:
    """Add the pools and the memory that there is; give what this machine has not enough of."""
    free = free_memory_bytes()
    budget = config.kv_cache_memory_bytes or kv_budget_bytes(blueprint.world_size)
    plan |= {"free_memory_bytes": free, "kv_budget_bytes_per_rank": budget}
    try:
        pools = blueprint.capacities(budget)
    except ConfigError as error:
        yield str(error)
        return
    for group, pool in zip(plan["kv_groups"], pools, strict=True):
        block_bytes = blueprint.kv_bytes([replace(pool, num_blocks=1)])
        group |= {"num_blocks": pool.num_blocks, "bytes_per_block": block_bytes}
    plan["kv_bytes"] = blueprint.kv_bytes(pools) * blueprint.world_size
    needed = sum(rank["weight_bytes"] for rank in plan["ranks"]) + plan["kv_bytes"]
    if config.devices == ("cpu",) and needed > free:
        yield f"weights and KV cache take {_gib(needed)}, free are {_gib(free)}"


def _told(plan: Mapping[str, Any]) -> Iterator[str]:
    """The plan line by line for people, with its arithmetic."""
    yield f"{plan['model']}: {plan['architecture']} in {plan['model_dir']}"
    yield f"tensors      {plan['tensors'] or 'not looked for'}"
    yield (
        f"weights      {plan['parameters']:,} parameters · {plan['dtype_bytes']} bytes ({plan['dtype']}) = "
        f"{plan['weight_bytes']:,} bytes"
    )
    for group in plan["kv_groups"]:
        yield from _told_group(group, plan)
    for rank in plan["ranks"]:
        yield (
            f"rank {rank['rank']:<8}weights {rank['weight_bytes']:,} bytes; KV cache {rank['kv_bytes_per_token']:,} "
            f"bytes a token, {rank['kv_bytes_per_token_beyond_window']:,} beyond the window"
        )
    yield (
        f"limits       context {plan['max_model_len']} tokens, {plan['max_num_seqs']} sequences at a time, "
        f"{plan['max_num_batched_tokens']} tokens in one step"
    )
    if "kv_budget_bytes_per_rank" in plan:
        yield f"budget       {plan['kv_budget_bytes_per_rank']:,} bytes of KV cache on each rank"
        yield f"memory       {_gib(plan['free_memory_bytes'])} free"


def _told_group(group: Mapping[str, Any], plan: Mapping[str, Any]) -> Iterator[str]:
    """What a token takes in one group, and where its pool was filled what that takes."""
    layers, heads, head_dim, size = len(group["layers"]), group["kv_heads"], group["head_dim"], plan["dtype_bytes"]
    window = f" {group['window']}" if "window" in group else ""
    yield (
        f"KV cache     each rank, {group['kind']}{window}: K and V · {layers} layers · {heads} heads · {head_dim} · "
        f"{size} bytes = {2 * layers * heads * head_dim * size:,} bytes a token"
    )
    if "num_blocks" in group:
        blocks, block_bytes = group["num_blocks"], group["bytes_per_block"]
        yield (
            f"             {blocks} blocks of {plan['block_size']} tokens · {block_bytes:,} bytes = "
            f"{_gib(blocks * block_bytes)}"
        )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):,.2f} GiB"
