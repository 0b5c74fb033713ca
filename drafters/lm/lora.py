"""Low-rank adapters on a draft language model through peft; a saved draft has them merged, so that
every engine can load it."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from draftsmith.drafters.options import LoraOptions


def add_adapters(model: PreTrainedModel, options: LoraOptions) -> None:
    """Add adapters in place to every linear layer but the head; freeze everything else."""
    from peft import LoraConfig, inject_adapter_in_model

    head = model.get_output_embeddings()
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    ]
    config = LoraConfig(
        r=options.rank, lora_alpha=options.alpha, target_modules=names, task_type="CAUSAL_LM"
    )
    inject_adapter_in_model(config, model)


@torch.no_grad()
def merged_state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The state dict of the plain model, with each adapter added into its layer; `model` itself is
    left as it is."""
    from peft.tuners.lora import LoraLayer

    adapted = {
        name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)
    }
    state: dict[str, torch.Tensor] = {}
    for key, value in model.state_dict().items():
        owner = next((name for name in adapted if key.startswith(f"{name}.")), None)
        if owner is None:
            state[key] = value
        elif key == f"{owner}.base_layer.weight":
            state[f"{owner}.weight"] = value + adapted[owner].get_delta_weight("default").to(value)
        elif key == f"{owner}.base_layer.bias":
            state[f"{owner}.bias"] = value
    return state
