"""Reloads one layer of vLLM's from tensors that this worker already has, by vLLM's own layerwise reload.

It puts the layer back into the state before anything was loaded, loads, does what is done after loading (repack,
shuffle, requantise), and copies the outcome to where kernels and captured graphs read: what vLLM's own backends for
weights in the checkpoint's layout do, here for one layer and without the loaders that divide and fuse.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
    make_online_process_loader,
)


def loaded_form(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Of the layer's parameters, as vLLM recorded them before it loaded anything: without values; not of biases."""
    return dict(get_layerwise_info(layer).restore_metadata[0])


def reload(layer: torch.nn.Module, loaded: Mapping[str, torch.Tensor], model_config: Any) -> None:
    """The layer is as if vLLM had loaded these tensors, which are all that loaded_form() names, in its shapes.

    Its parameters stay where they are. Raises what vLLM raises; the layer has its former tensors then, some of which
    may have new values.
    """
    parameters, buffers, method = dict(layer._parameters), dict(layer._buffers), layer.quant_method
    kernel = getattr(method, "moe_kernel", None)
    if isinstance(method, UnquantizedFusedMoEMethod) and method.unquantized_backend == UnquantizedMoeBackend.CPU:
        # With a kernel there vLLM leaves out the kernel's own step, in which the CPU's packs the weights.
        method.moe_kernel = None
    recorded: list[tuple[torch.Tensor, dict[str, Any]]] = []
    initialize_layerwise_reload(layer)
    try:
        for name in loaded:
            record = layer._parameters[name]
            assert record is not None
            recorded.append((record, dict(record.__dict__)))
            record.weight_loader = _load_whole
        for name, tensor in loaded.items():
            make_online_process_loader(layer, name)(layer._parameters[name], tensor)
        finalize_layerwise_reload(layer, model_config)
    except BaseException:
        get_layerwise_info(layer).reset()
        layer._parameters.clear()
        layer._parameters.update(parameters)
        layer._buffers.clear()
        layer._buffers.update(buffers)
        if kernel is not None:
            method.moe_kernel = kernel
        raise
    finally:
        for record, attributes in recorded:  # with vLLM's loaders, for reloads that come from elsewhere
            record.__dict__.clear()
            record.__dict__.update(attributes)


def _load_whole(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    assert param.shape == loaded_weight.shape, (param.shape, loaded_weight.shape)
    param.data.copy_(loaded_weight)
