"""Rows of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) and of the indexer of DeepSeek Sparse Attention.

r, c: ranks of the query and key-value latents; dn, dr: head size without and with position; dv: value head size.
`kv_b_proj` holds dn key rows, then dv value rows of each head. Megatron-Core keeps it whole (linear_kv_up_proj)
or, for absorbed attention, as its two halves (linear_k_up_proj, linear_v_up_proj): the live names tell.
Fused norms exist with the whole form only.
"""

from __future__ import annotations

from bridge.models.rows import FUSED_NORM, OWN_NORM, norm_row
from bridge.models.scope import Config, Scope
from bridge.ops import HeadRows, IndexerRows, Rename, RopeRows
from bridge.ops.mla import indexer_order
from bridge.rules import Rule

KV_WHOLE, KV_SPLIT = "kv_whole", "kv_split"  # forms


def mla_rows(config: Config, scope: Scope) -> list[Rule]:
    hidden, heads, c = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    dn, dr, dv = (config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    live, hf = "self_attention.", "self_attn."
    kv_a, kv_norm = {hf + "kv_a_proj_with_mqa.weight": (c + dr, hidden)}, {hf + "kv_a_layernorm.weight": (c,)}
    kv_b = {hf + "kv_b_proj.weight": (heads * (dn + dv), c)}

    def part(first: int, rows: int) -> HeadRows:
        return HeadRows(heads=heads, head_rows=dn + dv, first=first, rows=rows)

    return [
        norm_row(config, scope, OWN_NORM if config.get("q_lora_rank") is None else ""),
        *_query_rows(config, scope, live, hf),
        scope.rule(live + "linear_kv_down_proj.weight", kv_a, Rename(dim=0)),
        scope.rule(live + "kv_layernorm.weight", kv_norm, Rename(), OWN_NORM),
        scope.rule(live + "linear_kv_up_proj.layer_norm_weight", kv_norm, Rename(), FUSED_NORM),
        scope.rule(live + "linear_kv_up_proj.weight", kv_b, part(0, dn + dv), KV_WHOLE),
        scope.rule(live + "linear_k_up_proj.weight", kv_b, part(0, dn), KV_SPLIT),
        scope.rule(live + "linear_v_up_proj.weight", kv_b, part(dn, dv), KV_SPLIT),
        scope.rule(live + "linear_proj.weight", {hf + "o_proj.weight": (hidden, heads * dv)}, Rename(dim=1)),
    ]


def _query_rows(config: Config, scope: Scope, live: str, hf: str) -> list[Rule]:
    """A plain projection, or two with a norm between them."""
    hidden, heads, r = config["hidden_size"], config["num_attention_heads"], config.get("q_lora_rank")
    up = HeadRows.whole(heads, config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    rows = heads * up.head_rows
    if r is None:
        before = {"input_layernorm.weight": (hidden,)}
        return [
            scope.rule(live + "linear_q_proj.layer_norm_weight", before, Rename(), FUSED_NORM),
            scope.rule(live + "linear_q_proj.weight", {hf + "q_proj.weight": (rows, hidden)}, up),
        ]
    norm = {hf + "q_a_layernorm.weight": (r,)}
    return [
        scope.rule(live + "linear_q_down_proj.weight", {hf + "q_a_proj.weight": (r, hidden)}, Rename(dim=0)),
        scope.rule(live + "q_layernorm.weight", norm, Rename(), OWN_NORM),
        scope.rule(live + "linear_q_up_proj.layer_norm_weight", norm, Rename(), FUSED_NORM),
        scope.rule(live + "linear_q_up_proj.weight", {hf + "q_b_proj.weight": (rows, r)}, up),
    ]


def indexer_rows(config: Config, scope: Scope, source: RopeRows, target: RopeRows | None) -> list[Rule]:
    """The indexer of each layer in `scope`; a copy on every rank. `source`, `target`: order of its rows in the file
    and in the live model (None: the same)."""
    hidden, heads, size = config["hidden_size"], config["index_n_heads"], config["index_head_dim"]
    order = indexer_order(source, target or source, size, config["qk_rope_head_dim"])
    one, all_heads = IndexerRows(heads=1, order=order), IndexerRows(heads=heads, order=order)
    live, hf = "self_attention.core_attention.indexer.", "self_attn.indexer."
    weights = {hf + "weights_proj.weight": (heads, hidden)}
    return [
        scope.rule(live + "linear_wq_b.weight", {hf + "wq_b.weight": (heads * size, config["q_lora_rank"])}, all_heads),
        scope.rule(live + "linear_wk.weight", {hf + "wk.weight": (size, hidden)}, one),
        *(scope.rule(f"{live}k_norm.{kind}", {f"{hf}k_norm.{kind}": (size,)}, one) for kind in ("weight", "bias")),
        scope.rule(live + "linear_weights_proj.weight", weights, Rename()),
    ]


def full_indexer_layers(config: Config) -> list[int]:
    """Layers with an indexer of their own; the others use the selection of the last one before them.

    Order of truth: `indexer_types`, `index_topk_pattern`, `index_topk_freq` with `index_skip_topk_offset`
    (default 2), else every layer. ValueError if a list has another length than the model.
    """
    depth = config["num_hidden_layers"]
    types, pattern = config.get("indexer_types"), config.get("index_topk_pattern")
    for name, listed in (("indexer_types", types), ("index_topk_pattern", pattern)):
        if listed is not None and len(listed) != depth:
            raise ValueError(
                f"got {name} of {len(listed)} entries with num_hidden_layers={depth}; expected one a layer; "
                "correct config.json"
            )
    if types is not None:
        return [i for i, kind in enumerate(types) if kind == "full"]
    if pattern is not None:
        return [i for i, kind in enumerate(pattern) if kind == "F"]
    frequency = config.get("index_topk_freq") or 1
    offset = 2 if config.get("index_skip_topk_offset") is None else config["index_skip_topk_offset"]
    return [i for i in range(depth) if max(i - offset + 1, 0) % frequency == 0]
