"""Write a tiny random Hugging Face checkpoint of any family: for tests, recipe rehearsals and bug reports.

    python3 -m scripts.make_tiny --family glm_moe_dsa --out runs/models/glm5-tiny
    python3 -m scripts.make_tiny --family glm_moe_dsa --out DIR index_topk_freq=2 index_skip_topk_offset=2
    python3 -m scripts.make_tiny --family deepseek_v3 --out DIR kv_lora_rank=512 qk_rope_head_dim=64
    python3 -m scripts.make_tiny --family deepseek_v32 --out DIR --mtp 1 --fp8 dtype=bfloat16 seed=3

The second shares indexers between layers (arXiv 2603.12201). The third has the only latent size that vLLM's CPU
attention takes. `key=value` sets `seed`, `dtype` (of everything but correction biases and fp8 scales) or a field of
config.json; a value is JSON where it parses as JSON (`tie_word_embeddings=true indexer_types='["full","shared"]'`).

The sizes hide no mistake: no matrix is square (but for Qwen2, whose heads fill the hidden size). Weights are three
times as wide as transformers draws them and norm gains are 1 +- 0.3, so a swapped part or a missed norm shows in the
logits. Sixteen indexer heads make a tie of index scores (ReLU gives 0 for every head) unlikely.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import tempfile
from copy import deepcopy
from dataclasses import fields
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV32Config,
    Glm4MoeConfig,
    GlmMoeDsaConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

_COMMON = dict(
    vocab_size=130,
    hidden_size=80,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=104,
    rms_norm_eps=1e-6,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
_GROUPED = dict(_COMMON, num_key_value_heads=2)
_LATENT = dict(_COMMON, q_lora_rank=36, kv_lora_rank=22, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=28)
# topk_method and scoring_func: vLLM reads them, transformers does not.
_SIGMOID_EXPERTS = dict(
    n_routed_experts=8,
    num_experts_per_tok=4,
    moe_intermediate_size=44,
    n_shared_experts=1,
    first_k_dense_replace=1,
    routed_scaling_factor=2.5,
    norm_topk_prob=True,
    topk_method="noaux_tc",
    scoring_func="sigmoid",
    num_nextn_predict_layers=0,
)
_GROUP_LIMITED = dict(_SIGMOID_EXPERTS, n_group=4, topk_group=2)
_UNGROUPED = dict(_SIGMOID_EXPERTS, n_group=1, topk_group=1)
_SPARSE = dict(index_n_heads=16, index_head_dim=20, index_topk=4)
# The releases of these families have another base than the class default, 1e4: code that overlooks it must fail.
_ROPE = dict(rope_parameters={"rope_type": "default", "rope_theta": 5e4})

# model_type -> (config class, values)
FAMILIES: dict[str, tuple[type[PretrainedConfig], dict]] = {
    "llama": (LlamaConfig, dict(_GROUPED, head_dim=24)),
    "qwen2": (Qwen2Config, _GROUPED),  # has no head_dim of its own: hidden_size / heads
    "qwen3": (Qwen3Config, dict(_GROUPED, head_dim=24)),
    "qwen3_moe": (
        Qwen3MoeConfig,
        dict(_GROUPED, head_dim=24, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=44)
        | dict(_ROPE, norm_topk_prob=True),
    ),
    "glm4_moe": (
        Glm4MoeConfig,
        dict(_GROUPED, head_dim=24, attention_bias=True, use_qk_norm=True, **_UNGROUPED, **_ROPE),
    ),
    "deepseek_v3": (DeepseekV3Config, dict(_LATENT, **_GROUP_LIMITED)),
    "deepseek_v32": (DeepseekV32Config, dict(_LATENT, **_GROUP_LIMITED, **_SPARSE)),
    "glm_moe_dsa": (
        GlmMoeDsaConfig,
        dict(_LATENT, **_UNGROUPED, **_SPARSE, **_ROPE, indexer_rope_interleave=True),
    ),
}
# Fields that config.json may carry although the config class does not declare them.
FILE_ONLY = (
    "topk_method",
    "scoring_func",
    "moe_router_dtype",
    "num_nextn_predict_layers",
    "indexer_rope_interleave",
    "indexer_types",
    "index_topk_freq",
    "index_skip_topk_offset",
    "index_topk_pattern",
)
# What speaks about single layers; an MTP layer is always sparse and has its own indexer.
_PER_LAYER = {
    "num_hidden_layers",
    "first_k_dense_replace",
    "mlp_layer_types",
    "layer_types",
    "indexer_types",
    "index_topk_freq",
    "index_skip_topk_offset",
    "index_topk_pattern",
}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# One token per printable ASCII character behind the special ones.
_SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<|user|>", "<|assistant|>"]
VOCABULARY = {token: index for index, token in enumerate(_SPECIAL + [chr(code) for code in range(32, 127)])}
_BLOCK = 128
_QUANTISED = re.compile(
    r"\.(self_attn|mlp)\.(.*(?<!weights)_proj|kv_a_proj_with_mqa|indexer\.wq_b|indexer\.wk)\.weight$"
)


def tiny_config(family: str, /, **changes: object) -> PretrainedConfig:
    """The family's tiny configuration with `changes`. ValueError for a family or a field that does not exist."""
    if family not in FAMILIES:
        raise ValueError(f"got family {family!r}; expected one of {sorted(FAMILIES)}; change --family")
    config_class, own = FAMILIES[family]
    known = {field.name for field in fields(config_class)} | {*config_class.attribute_map, *own, *FILE_ONLY}
    if unknown := sorted(changes.keys() - known):
        near = difflib.get_close_matches(unknown[0], sorted(known), n=3, cutoff=0.4)
        raise ValueError(
            f"got unknown field {unknown[0]!r}; expected a field of {config_class.__name__} or one of "
            f"{list(FILE_ONLY)}; correct the name, nearest: {', '.join(near) or 'none'}"
        )
    values = deepcopy({"tie_word_embeddings": False, **own, **changes})  # config classes fill in what they are given
    if "kv_lora_rank" in own:  # keys and values are built per head from the latent: one per query head
        values.setdefault("num_key_value_heads", values["num_attention_heads"])
    try:
        config = config_class(**values)
    except StrictDataclassError as error:
        raise ValueError(
            f"got {changes}; expected values that {config_class.__name__} accepts; correct what it names: {error}"
        ) from error
    for key in {"indexer_types", "index_topk_pattern"} & changes.keys():  # transformers counts the other lists itself
        if len(changes[key]) != config.num_hidden_layers:
            raise ValueError(
                f"got {key} of length {len(changes[key])}; expected one entry for each of the "
                f"{config.num_hidden_layers} layers; correct {key} or num_hidden_layers"
            )
    return config


def write_checkpoint(
    folder: Path | str,
    family: str,
    /,
    *,
    seed: int = 0,
    dtype: str = "float32",
    mtp: int = 0,
    mtp_copies: bool = False,
    fp8: bool = False,
    **changes: object,
) -> Path:
    """Write config.json and model.safetensors; the same arguments give the same bytes.

    mtp         number of multi-token-prediction layers, stored as decoder layers after the last one
    mtp_copies  these layers also carry copies of the embedding and the head, as DeepSeek's release does
    fp8         linear weights of attention, MLP and experts in DeepSeek's block format (`quantise`)
    changes     fields of config.json
    """
    _check_options(family, dtype, mtp, mtp_copies)
    config = tiny_config(family, **({"num_nextn_predict_layers": mtp} if mtp else {}) | changes)
    if config.vocab_size < len(VOCABULARY):
        raise ValueError(
            f"got vocab_size={config.vocab_size}; expected at least {len(VOCABULARY)}, the ids of the tiny tokenizer; "
            "raise vocab_size"
        )
    folder = Path(folder)
    torch.manual_seed(seed)
    _random_model(config, _DTYPES[dtype]).save_pretrained(folder)
    if mtp or fp8:
        tensors = load_file(folder / "model.safetensors")
        if mtp:
            # After the model itself, so that its weights are the same with and without MTP layers.
            own = {key: value for key, value in changes.items() if key not in _PER_LAYER}
            layers = tiny_config(family, **own, num_hidden_layers=mtp, first_k_dense_replace=0)
            tensors |= _mtp_tensors(layers, config.num_hidden_layers, tensors, mtp_copies)
        if fp8:
            tensors = quantise(tensors)
            _declare_fp8(folder / "config.json")
        # The tensors may be views of the mapped old file: it must stay whole until the new one is.
        save_file(tensors, folder / "model.safetensors.partial", metadata={"format": "pt"})
        (folder / "model.safetensors.partial").rename(folder / "model.safetensors")
    return folder


def _check_options(family: str, dtype: str, mtp: int, mtp_copies: bool) -> None:
    if dtype not in _DTYPES:
        raise ValueError(f"got dtype={dtype}; expected one of {sorted(_DTYPES)}; for float8 weights use --fp8")
    having = [name for name, (_, values) in FAMILIES.items() if "num_nextn_predict_layers" in values]
    if mtp < 0 or (mtp and family not in having):
        raise ValueError(f"got --mtp {mtp} for {family}; expected 0, or more for one of {having}; leave --mtp out")
    if mtp_copies and not mtp:
        raise ValueError("got --mtp-copies without MTP layers; expected --mtp 1 or more; add --mtp 1")


def _random_model(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Drawn in fp32: weights scaled x3, gains 1 +- 0.3, random biases. Correction biases stay fp32."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("norm.weight"):
                _draw_gain(value)
            elif name.endswith("bias"):
                value.copy_(0.1 * torch.randn_like(value))
            elif "embed" in name:  # also the row of the padding token, which transformers leaves at zero
                value.normal_(std=0.06)
            else:
                value.mul_(3.0)
            value.data = value.data.to(dtype)
        for name, value in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                # Changes the choice of about half the tokens; with twice as much some experts get none.
                value.copy_(0.05 * torch.randn_like(value))
    return model


def _draw_gain(value: Tensor) -> Tensor:
    return value.copy_(1 + 0.3 * (2 * torch.rand_like(value) - 1))


def _mtp_tensors(config: PretrainedConfig, first: int, base: dict[str, Tensor], copies: bool) -> dict[str, Tensor]:
    """`model.layers.{first + k}.*` for the layers of `config`, in the names of DeepSeek-V3's release.

    transformers keeps no MTP layer in its models; the decoder layer inside one is an ordinary layer, so a model
    that has nothing else provides it. `eh_proj` [H, 2H] takes [embedding ; hidden].
    """
    embedding = base["model.embed_tokens.weight"]
    with tempfile.TemporaryDirectory() as folder:
        _random_model(config, embedding.dtype).save_pretrained(folder)
        drawn = load_file(Path(folder) / "model.safetensors")
    tensors = {}
    for k in range(config.num_hidden_layers):
        old, new = f"model.layers.{k}.", f"model.layers.{first + k}."
        tensors |= {new + name.removeprefix(old): value for name, value in drawn.items() if name.startswith(old)}
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            tensors[f"{new}{norm}.weight"] = _draw_gain(torch.empty(config.hidden_size)).to(embedding.dtype)
        projection = 0.06 * torch.randn(config.hidden_size, 2 * config.hidden_size)
        tensors[f"{new}eh_proj.weight"] = projection.to(embedding.dtype)
        if copies:
            head = embedding if config.tie_word_embeddings else base["lm_head.weight"]
            tensors[f"{new}embed_tokens.weight"] = embedding.clone()
            tensors[f"{new}shared_head.head.weight"] = head.clone()
    return tensors


def quantise(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """DeepSeek-V3's fp8 files: linear weights [R, C] of attention, MLP and experts become float8_e4m3fn beside
    `weight_scale_inv` fp32 [ceil(R/128), ceil(C/128)]; weight = float8 * scale of its 128 x 128 block, the last
    blocks may be short. Norms, router, biases, embedding, head, MTP projection and the indexer's `weights_proj`
    stay. (https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/README_WEIGHTS.md)"""
    written = {}
    for name, weight in tensors.items():
        if not _QUANTISED.search(name):
            written[name] = weight
            continue
        rows, columns = (-(-size // _BLOCK) for size in weight.shape)
        scale = torch.empty(rows, columns)
        quantised = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
        for r in range(rows):
            for c in range(columns):
                block = slice(r * _BLOCK, (r + 1) * _BLOCK), slice(c * _BLOCK, (c + 1) * _BLOCK)
                values = weight[block].float()
                scale[r, c] = values.abs().max() / torch.finfo(torch.float8_e4m3fn).max
                quantised[block] = (values / scale[r, c]).to(torch.float8_e4m3fn)
        written[name], written[f"{name}_scale_inv"] = quantised, scale
    return written


def _declare_fp8(path: Path) -> None:
    config = json.loads(path.read_text())
    config["quantization_config"] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [_BLOCK, _BLOCK],
    }
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def write_tokenizer(folder: Path | str) -> None:
    """One token per printable ASCII character, a chat template, and ids that fit the tiny models."""
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=_SPECIAL[4:],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = (
        "{{ bos_token }}{% for m in messages %}{{ '<|' ~ m['role'] ~ '|>' ~ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    fast.save_pretrained(folder)


def _parse(pair: str) -> tuple[str, object]:
    """`key=value` with a JSON value where it is one, else the text itself."""
    key, equals, text = pair.partition("=")
    if not equals:
        raise ValueError(f"got {pair!r}; expected key=value; write for example num_hidden_layers=4")
    try:
        return key, json.loads(text)
    except json.JSONDecodeError:
        return key, text


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", required=True, choices=sorted(FAMILIES))
    parser.add_argument("--out", required=True, type=Path, help="new or empty folder")
    parser.add_argument("--mtp", type=int, default=0, metavar="N", help="add N multi-token-prediction layers")
    parser.add_argument("--mtp-copies", action="store_true", help="with copies of the embedding and the head")
    parser.add_argument("--fp8", action="store_true", help="block-quantised weights as in DeepSeek-V3's release")
    parser.add_argument("changes", nargs="*", metavar="key=value", help="seed, dtype, or a field of config.json")
    args = parser.parse_intermixed_args(arguments)
    try:
        if args.out.exists() and any(args.out.iterdir()):
            raise ValueError(f"got --out {args.out}, which is not empty; expected a new or empty folder; change --out")
        changes = {"mtp": args.mtp, "mtp_copies": args.mtp_copies, "fp8": args.fp8, **dict(map(_parse, args.changes))}
        write_checkpoint(args.out, args.family, **changes)
    except ValueError as error:
        parser.error(str(error))
    write_tokenizer(args.out)
    count = sum(tensor.numel() for tensor in load_file(args.out / "model.safetensors").values())
    print(f"{args.out}: {args.family}, {count} elements")


if __name__ == "__main__":
    main()
