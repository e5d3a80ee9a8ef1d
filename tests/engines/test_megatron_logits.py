"""Raw logits of the Megatron model against transformers, packed sequences, one and two tensor-parallel ranks."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from engines import build_train_engine
from engines.batch import TrainBatch
from engines.megatron.forward import pack, run_chunk
from engines.spec import MegatronSpec, ModelSpec, TrainEngineSpec
from tests.ranks import run_ranks
from tests.tiny import MOE_KINDS, write_tiny_model

SEQUENCES = [[5, 6, 7, 8, 9, 129, 12], [0, 100, 129, 4], list(range(20, 39))]
VOCAB = 130  # divisible neither by 8 nor by 16: padded to 136 columns on one rank, 144 on two


def _logits(rank: int, world: int, folders: list[str]) -> list[torch.Tensor]:
    """[T, padded vocabulary] per model, gathered over tensor-parallel ranks."""
    gathered = []
    for folder in folders:
        backend = MegatronSpec(dtype="float32", tensor_model_parallel_size=world)
        engine = build_train_engine(TrainEngineSpec("megatron", "cpu", ModelSpec(folder), backend, None))
        engine.load(folder)
        batch = TrainBatch.pack(SEQUENCES)
        with torch.no_grad():
            local_1PV = run_chunk(engine.chunks[0], pack(batch, world, engine.device))
        parts = [torch.empty_like(local_1PV) for _ in range(world)]
        dist.all_gather(parts, local_1PV.contiguous())
        gathered.append(torch.cat(parts, dim=-1)[0, : batch.num_tokens])
        engine.close()
    return gathered


@pytest.mark.gloo
@pytest.mark.parametrize("ranks,columns", [(1, 136), (2, 144)])
def test_logits_equal_transformers(tmp_path: Path, ranks: int, columns: int):
    kinds = ("llama", "llama_tied", "qwen2", "qwen3", *MOE_KINDS)
    folders = [str(write_tiny_model(tmp_path / kind, kind)) for kind in kinds]
    for kind, folder, logits_TV in zip(kinds, folders, run_ranks(_logits, ranks, folders)[0], strict=True):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        with torch.no_grad():
            expected_TV = torch.cat([model(torch.tensor([ids])).logits[0] for ids in SEQUENCES])
        assert logits_TV.shape[-1] == columns
        difference = float((logits_TV[:, :VOCAB] - expected_TV).abs().max())
        assert difference <= 5e-6, f"{kind}: logits differ by {difference}"
        assert float(expected_TV.abs().max()) > 1, "logits near zero would prove little"
