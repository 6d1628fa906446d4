"""What a Gemma 4 config.json says: two class names, two spellings, and layers that are not all alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from peg.checkpoint.fields import Fields
from peg.checkpoint.rope import read_rope

SLIDING, FULL = "sliding_attention", "full_attention"
_MODALITY_IDS = (
    "boi_token_id",
    "eoi_token_id",
    "image_token_id",
    "video_token_id",
    "boa_token_id",
    "eoa_token_index",
    "audio_token_id",
)


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """One kind of layer. `window` None: sees all. `rotated` is the part of the pairs of a head that turns."""

    kv_heads: int
    head_dim: int
    window: int | None
    theta: float
    rotated: float = 1.0
    rope_factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Config:
    """What config.json says, by peg's names.

    `layer_types` has a name for each layer, `kinds` what the names stand for. Full layers with `k_eq_v` use K's
    product for V too. `per_layer_size` is 0 without per-layer embeddings. From layer `first_shared` on, layers read
    the K and V of an earlier one, and their MLPs have `shared_mlp_size`.
    """

    vocab_size: int
    hidden_size: int
    mlp_size: int
    shared_mlp_size: int
    num_layers: int
    query_heads: int
    norm_eps: float
    max_positions: int
    tied: bool
    softcap: float | None
    layer_types: tuple[str, ...]
    kinds: Mapping[str, AttentionKind]
    k_eq_v: bool
    first_shared: int
    per_layer_size: int
    per_layer_vocab_size: int
    forbidden_token_ids: tuple[int, ...]

    def kind(self, layer: int) -> AttentionKind:
        return self.kinds[self.layer_types[layer]]

    def is_shared(self, layer: int) -> bool:
        """Whether a layer has no K and V of its own."""
        return layer >= self.first_shared

    def owner(self, layer: int) -> int:
        """The layer whose K and V a layer attends to: itself, or the last of its kind that has its own."""
        if not self.is_shared(layer):
            return layer
        return max(other for other in range(self.first_shared) if self.layer_types[other] == self.layer_types[layer])

    @property
    def groups(self) -> Mapping[str, tuple[int, ...]]:
        """The layers of each kind that have K and V of their own: one KV group each, in this order."""
        owners = {
            kind: tuple(layer for layer in range(self.first_shared) if self.layer_types[layer] == kind)
            for kind in self.kinds
        }
        return {kind: layers for kind, layers in owners.items() if layers}


def parse_gemma4(config: Mapping[str, object]) -> Gemma4Config:
    """Read config.json. Raises CheckpointError for what peg cannot run, mixtures of experts among it."""
    outer = Fields(config)
    fields = outer.section("text_config") or outer
    _refuse_what_peg_cannot_run(outer, fields)
    layers = fields.integer("num_hidden_layers")
    heads = fields.integer("num_attention_heads")
    layer_types = _layer_types(fields, layers)
    k_eq_v = fields.boolean("attention_k_eq_v", default=False)
    shared = fields.integer("num_kv_shared_layers", default=0, minimum=0)
    if shared >= layers or set(layer_types[: layers - shared]) != set(layer_types):
        raise fields.error("num_kv_shared_layers", "each kind of layer needs one that has K and V of its own")
    mlp_size = fields.integer("intermediate_size")
    tied = fields.boolean("tie_word_embeddings", default=True)
    outer.expect("tie_word_embeddings", tied)
    vocab_size = fields.integer("vocab_size")
    return Gemma4Config(
        vocab_size=vocab_size,
        hidden_size=fields.integer("hidden_size"),
        mlp_size=mlp_size,
        shared_mlp_size=mlp_size * (2 if fields.boolean("use_double_wide_mlp", default=False) else 1),
        num_layers=layers,
        query_heads=heads,
        norm_eps=fields.number("rms_norm_eps"),
        max_positions=fields.integer("max_position_embeddings"),
        tied=tied,
        softcap=fields.optional_number("final_logit_softcapping"),
        layer_types=layer_types,
        kinds=_kinds(fields, layer_types, heads, k_eq_v=k_eq_v),
        k_eq_v=k_eq_v,
        first_shared=layers - shared,
        per_layer_size=_per_layer_size(fields),
        per_layer_vocab_size=fields.integer("vocab_size_per_layer_input", default=vocab_size),
        forbidden_token_ids=tuple(
            token_id for name in _MODALITY_IDS for token_id in outer.token_ids(name) if token_id < vocab_size
        ),
    )


def tensor_shapes(config: Gemma4Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor."""
    M, P, layers = config.hidden_size, config.per_layer_size, config.num_layers
    yield "model.embed_tokens.weight", (config.vocab_size, M)
    yield "model.norm.weight", (M,)
    if not config.tied:
        yield "lm_head.weight", (config.vocab_size, M)
    if P:
        yield "model.embed_tokens_per_layer.weight", (config.per_layer_vocab_size, layers * P)
        yield "model.per_layer_model_projection.weight", (layers * P, M)
        yield "model.per_layer_projection_norm.weight", (P,)
    for layer in range(layers):
        for name, shape in _layer_shapes(config, layer).items():
            yield f"model.layers.{layer}.{name}.weight", shape
        yield f"model.layers.{layer}.layer_scalar", (1,)


def _layer_shapes(config: Gemma4Config, layer: int) -> dict[str, tuple[int, ...]]:
    M, P, kind, shared = config.hidden_size, config.per_layer_size, config.kind(layer), config.is_shared(layer)
    q, kv = config.query_heads * kind.head_dim, kind.kv_heads * kind.head_dim
    mlp = config.shared_mlp_size if shared else config.mlp_size
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (M,),
        "self_attn.q_proj": (q, M),
        "self_attn.q_norm": (kind.head_dim,),
        "self_attn.o_proj": (M, q),
        "post_attention_layernorm": (M,),
        "pre_feedforward_layernorm": (M,),
        "mlp.gate_proj": (mlp, M),
        "mlp.up_proj": (mlp, M),
        "mlp.down_proj": (M, mlp),
        "post_feedforward_layernorm": (M,),
    }
    if not shared:
        shapes |= {f"self_attn.{name}": (kv, M) for name in projections(config, layer)[1:]}
        shapes["self_attn.k_norm"] = (kind.head_dim,)
    if P:
        shapes |= {"per_layer_input_gate": (P, M), "per_layer_projection": (M, P), "post_per_layer_input_norm": (M,)}
    return shapes


def projections(config: Gemma4Config, layer: int) -> tuple[str, ...]:
    """Which of the products for q, k and v a layer has."""
    if config.is_shared(layer):
        return ("q_proj",)
    k_only = config.k_eq_v and config.layer_types[layer] == FULL
    return ("q_proj", "k_proj") if k_only else ("q_proj", "k_proj", "v_proj")


def _refuse_what_peg_cannot_run(outer: Fields, fields: Fields) -> None:
    outer.expect("quantization_config")
    fields.expect("quantization_config")
    fields.expect("model_type", "gemma4_text", "gemma4_unified_text")
    fields.expect("hidden_activation", "gelu_pytorch_tanh")
    fields.expect("attention_bias", False)
    if fields.boolean("enable_moe_block", default=False):
        raise fields.error("enable_moe_block", "peg cannot run mixtures of experts so far")
    # "vision" changes what image tokens see; to text it is causal. "all" is another model.
    fields.expect("use_bidirectional_attention", "vision")


def _layer_types(fields: Fields, layers: int) -> tuple[str, ...]:
    """The last layer is a full one, whatever the file says: so does the reference."""
    named = fields.strings("layer_types")
    if named is None:
        named = tuple(SLIDING if (layer + 1) % 6 else FULL for layer in range(layers))
    if len(named) != layers or not set(named) <= {SLIDING, FULL}:
        raise fields.error("layer_types", f"must be {SLIDING} or {FULL} for each of {layers} layers")
    return (*named[:-1], FULL)


def _kinds(
    fields: Fields, layer_types: tuple[str, ...], query_heads: int, *, k_eq_v: bool
) -> Mapping[str, AttentionKind]:
    kv_heads, head_dim = fields.integer("num_key_value_heads"), fields.integer("head_dim", default=256)
    local = read_rope(fields, SLIDING)
    if local.rope_type != "default":
        raise fields.error("rope_parameters", f"{SLIDING} must be of rope_type default")
    sliding = AttentionKind(kv_heads, head_dim, fields.integer("sliding_window"), local.theta)
    full = _full_kind(fields, layer_types, kv_heads, head_dim, k_eq_v=k_eq_v)
    for kind in (sliding, full):
        if query_heads % kind.kv_heads:
            raise fields.error("num_attention_heads", f"must divide by the {kind.kv_heads} KV heads")
        if kind.head_dim % 2:
            raise fields.error("head_dim", "must be even, in each kind of layer")
    return {SLIDING: sliding, FULL: full}


def _full_kind(
    fields: Fields, layer_types: tuple[str, ...], kv_heads: int, head_dim: int, *, k_eq_v: bool
) -> AttentionKind:
    """The kind of full layers, from the hub's spelling or from that of the reference's save_pretrained."""
    per_layer = fields.section("per_layer_config")
    if per_layer is None:
        global_heads = fields.optional_integer("num_global_key_value_heads") if k_eq_v else None
        heads, dim = global_heads or kv_heads, fields.integer("global_head_dim", default=512)
    else:
        heads, dim = _read_per_layer(fields, per_layer, layer_types, (kv_heads, head_dim))
    theta, rotated, factor = _proportional_rope(fields)
    return AttentionKind(heads, dim, None, theta, rotated, factor)


def _read_per_layer(
    fields: Fields, per_layer: Fields, layer_types: tuple[str, ...], common: tuple[int, int]
) -> tuple[int, int]:
    """KV heads and head dim that all full layers have; the sliding ones must have the `common` ones."""
    if {"global_head_dim", "num_global_key_value_heads"} & fields.names:
        raise fields.error("per_layer_config", "global_head_dim and num_global_key_value_heads mean the same")
    found: dict[str, set[tuple[int, int]]] = {SLIDING: {common}, FULL: set()}
    known = {str(layer) for layer in range(len(layer_types))}
    if unknown := sorted(per_layer.names - known):
        raise per_layer.error(unknown[0], f"there are {len(layer_types)} layers")
    for layer, kind in enumerate(layer_types):
        own = per_layer.section(str(layer)) or Fields({})
        if unknown := sorted(own.names - {"num_key_value_heads", "head_dim"}):
            raise own.error(unknown[0], "peg knows no layer of its own in this field")
        heads = own.integer("num_key_value_heads", default=common[0])
        found[kind].add((heads, own.integer("head_dim", default=common[1])))
    if any(len(values) > 1 for values in found.values()):
        raise fields.error("per_layer_config", "layers of one kind must be alike")
    return found[FULL].pop()


def _proportional_rope(fields: Fields) -> tuple[float, float, float]:
    """Theta, the part that turns, and the factor, of full layers."""
    kinds = fields.section("rope_parameters")
    if kinds is None:
        return 1e6, 0.25, 1.0
    rope = kinds.section(FULL)
    if rope is None:
        raise kinds.error(FULL, "rope parameters of this kind of layer are required")
    if rope.text("rope_type") != "proportional":
        raise rope.error("rope_type", "peg supports only proportional in full layers")
    if unknown := sorted(rope.names - {"rope_type", "rope_theta", "partial_rotary_factor", "factor"}):
        raise rope.error(unknown[0], "not a parameter of rope type proportional")
    rotated = rope.number("partial_rotary_factor", default=1.0)
    if rotated > 1:
        raise rope.error("partial_rotary_factor", "must be at most 1")
    return rope.number("rope_theta"), rotated, rope.number("factor", default=1.0)


def _per_layer_size(fields: Fields) -> int:
    unified = fields.text("model_type", default="gemma4_text") == "gemma4_unified_text"
    return fields.integer("hidden_size_per_layer_input", default=0 if unified else 256, minimum=0)
