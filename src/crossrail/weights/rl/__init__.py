"""A small but complete loop of reinforcement learning: a Qwen3-MoE of transformers, trained under FSDP2 on the CPU.

task.py says what is rewarded; policy.py trains, in one process for each shard; serving.py generates, from fused tensors
as vLLM has them; conversion.py makes the same tensors from a checkpoint, with torch alone, to compare. policy.py needs
`crossrail[weights]`. `crossrail weights rl` runs it.
"""
