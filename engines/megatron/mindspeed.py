"""The Ascend adaptation of Megatron-Core through MindSpeed, branch core_r0.16.0.

MindSpeed replaces Megatron's functions when it is imported and again when it is told the settings of a run
(`repatch`). Both must happen before the first Megatron module is imported, so this file imports neither at the
top: `build_engine`, the registry's entry, does it in order. Untested on NPU: only the CPU part of it has run.

What is corrected afterwards stands below, one function each, with its reason and when it can go.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from engines.megatron.mindspeed_flags import ABSORB, FUSED_DSA, PARSER_FLAGS, repatch_arguments
from engines.megatron.mindspeed_rules import check
from engines.spec import ModelSpec, TrainEngineSpec

if TYPE_CHECKING:
    from engines.base import TrainEngine

log = logging.getLogger(__name__)

MEGATRON_CORE = "0.16."
INSTALL = (
    "install: pip install megatron-core==0.16.1 scipy einops, and MindSpeed from "
    "https://gitee.com/ascend/MindSpeed, branch core_r0.16.0"
)
_DSA = "megatron.core.transformer.experimental_attention_variant.dsa"
_SPECS = "megatron.core.models.gpt.experimental_attention_variant_module_specs"
# What must have been replaced after repatch: always, and per flag.
_ALWAYS = (
    "megatron.core.transformer.transformer_config.TransformerConfig.__post_init__",
    "megatron.core.extensions.transformer_engine.TEColumnParallelLinear",
    "megatron.core.extensions.transformer_engine.TELinear",
    "megatron.core.extensions.transformer_engine.TENorm",
)
_EXPECTED = {
    ABSORB: (
        "megatron.core.transformer.multi_latent_attention.MLASelfAttention",
        f"{_SPECS}.get_dsa_module_spec_for_backend",
        f"{_SPECS}.get_experimental_attention_variant_module_spec",
    ),
    FUSED_DSA[1]: (f"{_DSA}.DSAttention.forward", f"{_DSA}.DSAIndexer.forward_with_scores"),
    "use_flash_attn": ("megatron.core.transformer.dot_product_attention.DotProductAttention.forward",),
    "use_fused_swiglu": ("megatron.core.fusions.fused_bias_swiglu.SwiGLUFunction",),
    "use_fused_rotary_pos_emb": ("megatron.core.models.common.embeddings.rope_utils.apply_rotary_pos_emb",),
}
_adapted_with: dict[str, Any] = {}  # the argument of this process's one repatch


def build_engine(spec: TrainEngineSpec) -> TrainEngine:
    """Adapt Megatron-Core to Ascend (once per process), then build the engine.

    ValueError when MindSpeed is absent, another version, cannot do what the run asks for, or was told
    something else for an earlier engine of this process. There is no fallback to Megatron without MindSpeed.
    """
    check_spec(spec)
    bootstrap(repatch_arguments(read_config_json(spec.model), spec.backend, spec.device))
    from engines.megatron.npu_engine import MindSpeedEngine  # imports megatron: only now

    return MindSpeedEngine(spec)


def check_spec(spec: TrainEngineSpec) -> None:
    """ValueError with everything about `spec` that MindSpeed cannot do."""
    check(read_config_json(spec.model), spec.backend, spec.device)


def read_config_json(model: ModelSpec) -> dict[str, Any]:
    """config.json with `override_config` on top, as it stands: the rooms that check its content import Megatron."""
    path = Path(model.path) / "config.json"
    if not path.is_file():
        raise ValueError(
            f"got model path {model.path} without config.json; expected a Hugging Face directory; set model.path"
        )
    return {**json.loads(path.read_text()), **model.override_config}


def bootstrap(arguments: dict[str, Any]) -> None:
    """Import MindSpeed, tell it `arguments`, and verify that the functions they ask for were replaced."""
    if _adapted_with:
        if arguments != _adapted_with:
            different = sorted(
                key for key in arguments.keys() | _adapted_with.keys() if arguments.get(key) != _adapted_with.get(key)
            )
            raise ValueError(
                f"got a second Megatron engine that differs from the first in {', '.join(different)}; expected one set "
                "of MindSpeed settings per process, which they change as a whole; give actor and reference the same"
            )
        return
    adaptor = _import_adaptor()
    _require_flags(arguments)
    try:
        adaptor.repatch(arguments)
    except (RuntimeError, AssertionError, ImportError) as error:
        raise ValueError(
            f"got MindSpeed's answer {error!r} to {arguments}; expected it to take these settings; remove the flag it "
            "names from override_transformer_config, and start again: the process is half adapted"
        ) from error
    _require_targets(arguments)
    rebind_optimizer()
    if arguments.get("experimental_attention_variant") == "dsa":
        remove_rotation()
        name_rope_group()
    _adapted_with.update(arguments)


def _import_adaptor() -> ModuleType:
    early = sorted(name for name in sys.modules if name.split(".")[0] == "megatron")
    if early:
        raise ValueError(
            f"got {len(early)} Megatron modules loaded before MindSpeed ({early[0]}, ...); expected MindSpeed first: "
            "what is loaded earlier keeps its decisions against Transformer Engine; import engines.megatron.engine "
            "nowhere else in this process"
        )
    _require_packages()
    try:
        with _no_arguments():
            return importlib.import_module("mindspeed.megatron_adaptor")
    except (ImportError, SystemExit) as error:  # its argument parser ends the process on a bad command line
        raise _missing(f"{type(error).__name__}: {error}") from error


def _require_packages() -> None:
    if importlib.util.find_spec("mindspeed") is None:
        raise _missing("no package mindspeed")
    try:
        version = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        raise _missing("no package megatron-core") from None
    if not version.startswith(MEGATRON_CORE):
        raise _missing(f"megatron-core {version}")


def _missing(found: str) -> ValueError:
    return ValueError(
        f"got {found}; expected MindSpeed core_r0.16.0 on megatron-core {MEGATRON_CORE}x: the megatron engine on npu "
        f"never runs without it; {INSTALL}, or set model_engine=fsdp"
    )


@contextlib.contextmanager
def _no_arguments() -> Iterator[None]:
    """MindSpeed parses the command line of the process while it is imported: show it none."""
    argv = sys.argv
    sys.argv = argv[:1]
    try:
        yield
    finally:
        sys.argv = argv


def _require_flags(arguments: dict[str, Any]) -> None:
    """repatch takes any name in silence, so a flag this MindSpeed does not know would be no flag at all."""
    known = vars(importlib.import_module("mindspeed.args_utils").get_full_args())
    unknown = sorted(name for name in arguments if name in PARSER_FLAGS and name not in known)
    if unknown:
        raise _missing(f"a MindSpeed without {', '.join(unknown)}")


def _require_targets(arguments: dict[str, Any]) -> None:
    patches = importlib.import_module("mindspeed.patch_utils").MindSpeedPatchesManager.patches_info
    applied = sorted(name for name, patch in patches.items() if patch.is_applied)
    wanted = [*_ALWAYS, *(name for flag, names in _EXPECTED.items() if arguments.get(flag) for name in names)]
    missing = sorted(set(wanted) - set(applied))
    if missing:
        raise _missing(f"a MindSpeed that left {', '.join(missing)} unreplaced")
    digest = hashlib.sha256("\n".join(applied).encode()).hexdigest()[:12]
    log.info("MindSpeed replaced %d functions of Megatron (list %s)", len(applied), digest)


def rebind_optimizer() -> None:
    """Megatron's Adam is the one that `optimizer_selection` chose.

    Reason: Megatron binds it as `Adam` while MindSpeed is imported, before repatch; MindSpeed looks for the name
    FusedAdam and misses it, so the setting has no effect. Place: megatron/core/optimizer/__init__.py and MindSpeed's
    requirements_basic.py. Goes when the setting takes effect by itself.
    """
    importlib.import_module("megatron.core.optimizer").Adam = importlib.import_module("apex.optimizers").FusedAdam


def unrotated(x: Tensor) -> Tensor:
    """The indexer's activations as they are."""
    return x


def remove_rotation() -> None:
    """Hadamard rotation of the indexer's queries and keys: none in bf16.

    Reason: it spreads outliers for quantised indexers; being orthogonal it only adds rounding here, and the
    rollout engines do not rotate. Place: `rotate_activation`, bound by name in Megatron's dsa.py and in MindSpeed's
    dsa_fused.py; repatch binds it again, so this comes after. Goes when the branch has a switch for it.
    """
    for name in (_DSA, "mindspeed.core.transformer.experimental_attention_variant.dsa_fused"):
        module = importlib.import_module(name)
        assert callable(module.rotate_activation), f"{name} has no rotate_activation any more"
        module.rotate_activation = unrotated


def name_rope_group() -> None:
    """Rotary embeddings of packed sequences know their context-parallel group without being told.

    Reason: MindSpeed's fused indexer calls them without a group, which Megatron 0.16 refuses; its own replacement
    comes with reset_attention_mask only, which needs megatron.training. Place: dsa_fused.py, forward_with_scores.
    Goes when that call passes the group. After repatch, which binds the function again.
    """
    rope = importlib.import_module("megatron.core.models.common.embeddings.rope_utils")
    state = importlib.import_module("megatron.core.parallel_state")
    apply = rope._apply_rotary_pos_emb_thd

    @functools.wraps(apply)
    def with_group(*args: Any, cp_group: Any = None, **kwargs: Any) -> Tensor:
        return apply(*args, cp_group=cp_group or state.get_context_parallel_group(), **kwargs)

    rope._apply_rotary_pos_emb_thd = with_group


def unmark_replicated(models: Iterable[nn.Module]) -> None:
    """Weights that every tensor-parallel rank holds whole are not marked as split.

    Reason: MindSpeed's initialisation marks all linears, and the gradient norm would count these once per rank.
    Place: te/pytorch/module/linear.py, TELinear with parallel_mode "duplicated". Goes when it marks them right.
    """
    for model in models:
        for module in model.modules():
            if vars(module).get("parallel_mode") == "duplicated":
                for parameter in module.parameters(recurse=False):
                    parameter.tensor_model_parallel = False


def require_absorbed(names: Iterable[str], absorbed: bool) -> None:
    """The form of the attention, told by the live names: two absorbed projections, or one up-projection.

    ValueError with the names found. Stages without a decoder layer prove nothing and pass.
    """
    tails = {name.rsplit("self_attention.", 1)[1] for name in names if ".self_attention." in name}
    wanted = {"linear_k_up_proj.weight", "linear_v_up_proj.weight"} if absorbed else {"linear_kv_up_proj.weight"}
    if tails and not wanted <= tails:
        raise ValueError(
            f"got a model with {', '.join(sorted(tails))}; expected {', '.join(sorted(wanted))} "
            f"with {ABSORB}={absorbed}; {INSTALL}"
        )
