"""A model with Transformer Engine's parameter names, which needs no GPU: names and shapes are all that sync/ reads."""

from __future__ import annotations

import re
from typing import Any

import torch

# Local layer spec -> Transformer Engine, as its layers name their parameters.
_RENAMED = (
    (r"\.self_attention\.(q|kv)_layernorm\.weight$", r".self_attention.linear_\1_up_proj.layer_norm_weight"),
    (r"\.mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)$", r".mlp.experts.\2.\3\1"),
)
# Before latents the norm stays a module of its own, and so it does before experts.
_INPUT_NORM = (r"\.input_layernorm\.weight$", ".self_attention.linear_qkv.layer_norm_weight")
_DENSE_NORM = (r"\.pre_mlp_layernorm\.weight$", ".mlp.linear_fc1.layer_norm_weight")


def transformer_engine_twin(model: Any) -> torch.nn.Module:
    """A module tree that holds `model`'s parameters under Transformer Engine's names."""
    twin = torch.nn.Module()
    biases = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("expert_bias")]
    for name, parameter in [*model.named_parameters(), *biases]:
        layer = re.match(r"decoder\.layers\.(\d+)\.", name)
        rules = list(_RENAMED)
        if layer and hasattr(model.decoder.layers[int(layer[1])].self_attention, "linear_qkv"):
            rules.append(_INPUT_NORM)
        if layer and not hasattr(model.decoder.layers[int(layer[1])].mlp, "router"):
            rules.append(_DENSE_NORM)
        for pattern, replacement in rules:
            name = re.sub(pattern, replacement, name)
        if name.endswith("softmax_offset"):
            parameter = torch.nn.Parameter(parameter.detach().view(1, -1, 1, 1))
        *path, leaf = name.split(".")
        module = twin
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, torch.nn.Module())
            module = getattr(module, part)
        if isinstance(parameter, torch.nn.Parameter):
            module.register_parameter(leaf, parameter)
        else:
            module.register_buffer(leaf, parameter)
    layers = [module for _, module in sorted(twin.decoder.layers.named_children(), key=lambda item: int(item[0]))]
    for layer_module, original in zip(layers, model.decoder.layers):
        layer_module.layer_number = original.layer_number
    twin.decoder.layers = torch.nn.ModuleList(layers)
    return twin
