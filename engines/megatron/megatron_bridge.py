"""NVIDIA's Megatron-Bridge behind the surface of our own weight bridge.

It serves the families that `bridge/models` has no rules for, and it is a second opinion where both know a
family. The package is optional and imported only when asked for. It skips a weight it cannot place with a warning;
here that is an error, at load and at export. Tested with megatron-bridge 0.6.2 and megatron-core 0.19.2.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import logging
import re
import sys
from collections.abc import Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from bridge.models import FAMILIES, has_value_head
from engines.megatron import cpu
from engines.megatron.layers.dsa.indexer import ReplicatedLinear
from engines.megatron.layers.moe import Router
from engines.spec import ModelSpec

PACKAGE = "megatron-bridge"
VERSIONS = "0.6"
TIED_HEAD = "lm_head.weight"
EMBEDDINGS = ("embedding.word_embeddings.weight", "output_layer.weight")  # live names of padded vocabularies
RECOMPUTED = re.compile(r".*\.rotary_emb\.inv_freq$")


def choose_bridge(
    setting: Literal["auto", "native", "megatron_bridge"], hf_config: dict[str, Any]
) -> Literal["native", "megatron_bridge"]:
    """Which bridge converts the weights of this config.json.

    auto: ours for the families it knows, else Megatron-Bridge. ValueError if that one is needed or asked for and
    not installed, or not a version we know.
    """
    if setting == "native" or (setting == "auto" and hf_config["model_type"] in FAMILIES):
        return "native"
    if has_value_head(hf_config):
        raise ValueError(
            f"got bridge={setting!r} for a critic of model_type {hf_config['model_type']!r}; expected one of "
            f"{sorted(FAMILIES)} and our own bridge: {PACKAGE} knows no value head; set megatron.bridge=native and "
            "choose such a model"
        )
    found = installed_version()
    if found is None or not found.startswith(f"{VERSIONS}."):
        wanted = "megatron.bridge=megatron_bridge" if setting != "auto" else f"model_type {hf_config['model_type']!r}"
        raise ValueError(
            f"got {wanted} with {f'{PACKAGE} {found}' if found else f'the package {PACKAGE} not installed'}; expected "
            f"{PACKAGE} {VERSIONS}.x (Python 3.12), or one of the families {sorted(FAMILIES)} that need no package; "
            "install it as scripts/leg_megatron_bridge.sh does, or set megatron.bridge=native and choose such a model"
        )
    return "megatron_bridge"


def installed_version() -> str | None:
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None


class MegatronBridge:
    """Converts the weights of one model copy by Megatron-Bridge's AutoBridge.

    model   directory and overrides; its weight files name the tensors an export must yield
    chunks  live GPTModels of this rank (one, or one per virtual pipeline stage)
    device  kind of device the chunks are on
    All methods are collective over the tensor-, pipeline- and expert-parallel groups of the model copy.
    """

    def __init__(self, model: ModelSpec, chunks: list[GPTModel], device: str) -> None:
        self._model, self._chunks = model, chunks
        import_megatron_bridge(device)
        self._open(model.path)
        config = self._auto.hf_pretrained.config
        self._tied, self._vocab_size = bool(config.tie_word_embeddings), config.vocab_size
        for chunk in chunks:  # where Megatron-Bridge looks; its own models carry the flag there
            chunk.config.share_embeddings_and_output_weights = self._tied

    def _open(self, path: Path | str) -> None:
        from megatron.bridge import AutoBridge

        self._auto = AutoBridge.from_hf_pretrained(
            str(path), trust_remote_code=self._model.trust_remote_code, **self._model.override_config
        )

    @torch.no_grad()
    def load(self, hf_dir: Path | str) -> None:
        """Read every weight of this rank from a folder. ValueError naming those that nothing was written to."""
        self._open(hf_dir)
        tasks, live = self._tasks(), self._live()
        for _, tensor in live:
            tensor.fill_(float("nan"))
        if parallel_state.get_tensor_model_parallel_world_size() == 1:
            self._load_padded(tasks)
        self._auto.load_hf_weights(self._chunks, allowed_mismatched_params=list(EMBEDDINGS))
        unwritten = [name for name, tensor in live if tensor.isnan().any()]
        if unwritten:
            raise ValueError(
                f"got no value, or NaN, for {len(unwritten)} weights from {hf_dir}: {_listed(unwritten)}; "
                "expected a number for each; use files that hold them"
            )

    def _load_padded(self, tasks: list[Any]) -> None:
        """Megatron-Bridge pads a vocabulary only where it cuts it: without tensor parallelism this is for us to do,
        before its load, which copies a tied embedding on to the last stage."""
        for task in tasks:
            if task.param_weight is not None and task.global_param_name in EMBEDDINGS:
                task.param_weight[: self._vocab_size] = self._auto.hf_pretrained.state[task.mapping.hf_param]
                task.param_weight[self._vocab_size :] = 0

    @torch.no_grad()
    def hf_weights(self, source_only: bool = True) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor in the live dtype). With `source_only` global rank 0 yields, others do
        not. ValueError at the end if a tensor of the files was not among them."""
        tasks = self._tasks()
        padded = {task.mapping.hf_param for task in tasks if task.global_param_name in EMBEDDINGS}
        missing = {name for name in self._auto.hf_pretrained.state.source.get_all_keys() if not RECOMPUTED.match(name)}
        silent = source_only and dist.get_rank() != 0
        for name, tensor in self._auto.export_hf_weights(self._chunks, show_progress=False, conversion_tasks=tasks):
            missing.discard(name)
            if not silent and not (self._tied and name == TIED_HEAD):
                yield name, tensor[: self._vocab_size] if name in padded else tensor
        missing -= {TIED_HEAD} if self._tied else set()
        if missing:
            raise ValueError(
                f"got no live weight for {len(missing)} tensors of {self._model.path}: {_listed(sorted(missing))}; "
                "expected one for each; use another model"
            )

    def _tasks(self) -> list[Any]:
        """What goes where, for the weights of all pipeline stages. ValueError naming the live weights of this rank
        that the package has no mapping for."""
        tasks = self._auto.get_conversion_tasks(self._chunks)
        if None in tasks:
            claimed = {task.param_name for task in tasks if task is not None}
            unknown = [name for name, _ in self._live() if name not in claimed]
            raise ValueError(
                f"got {tasks.count(None)} live weights that {PACKAGE} cannot place, here {_listed(unknown)}; expected "
                f"a mapping for each; use another model, or megatron.bridge=native if it is one of {sorted(FAMILIES)}"
            )
        return tasks

    def _live(self) -> list[tuple[str, Tensor]]:
        """Parameters and the floating buffers that are saved, such as a router's expert bias, of all chunks."""
        return [
            (name, tensor)
            for chunk in self._chunks
            for name, tensor in chunk.state_dict(keep_vars=True).items()
            if isinstance(tensor, Tensor) and tensor.is_floating_point()
        ]


def _listed(names: list[str]) -> str:
    return ", ".join(names[:20]) + (" ..." if len(names) > 20 else "")


def import_megatron_bridge(device: str) -> None:
    """Import the package, on a host without TransformerEngine too, and register our rows with it."""
    if "megatron.bridge" in sys.modules:
        return
    with _logging_kept(), _stand_in_for_transformer_engine():
        importlib.import_module("megatron.bridge")
    if device == "cpu":
        cpu.adapt()
    _register_our_layers()


def _register_our_layers() -> None:
    """Layers the package cannot know: replicated ones of ours, and the halves of kv_b_proj."""
    from megatron.bridge.models.conversion.param_mapping import AutoMapping

    from engines.megatron.kv_split import register_kv_split

    for layer in (Router, ReplicatedLinear):
        AutoMapping.register_module_type(layer.__name__, "replicated")
    register_kv_split()


@contextlib.contextmanager
def _logging_kept() -> Iterator[None]:
    """The import logs a page of tracebacks as information, and megatron.training configures the root logger."""
    root = logging.getLogger()
    level, handlers, disabled = root.level, list(root.handlers), root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(disabled)
        root.setLevel(level)
        root.handlers[:] = handlers


@contextlib.contextmanager
def _stand_in_for_transformer_engine() -> Iterator[None]:
    """Let `import transformer_engine` succeed while Megatron-Bridge is imported, and forget it afterwards.

    Reason: megatron/bridge/peft imports it unconditionally and names its classes in annotations; converting weights
    needs none of it. Goes when the package guards those imports. Nothing happens where it is installed.
    """
    if importlib.util.find_spec("transformer_engine") is not None:
        yield
        return
    finder = _StandInFinder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if _is_transformer_engine(name)]:
            del sys.modules[name]


def _is_transformer_engine(name: str) -> bool:
    return name.partition(".")[0] in ("transformer_engine", "transformer_engine_torch")


class _StandInFinder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if _is_transformer_engine(name) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _StandInClass(type):
    """The class of classes whose every attribute is such a class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandInClass(name, (), {})


class _StandInModule(ModuleType):
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandInClass(name, (), {})
