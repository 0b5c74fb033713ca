"""A draft language model cut out of its target: a few of its layers between its own embeddings,
last norm and head."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from draftsmith.drafters.patches.table import implementation
from draftsmith.drafters.target.attention import register
from draftsmith.drafters.target.causal_lm import whole
from draftsmith.drafters.target.load import build_model
from draftsmith.drafters.target.quantised import numbers_of, quantisation
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError


def pruned_target(target: Target, layers: Sequence[int]) -> PreTrainedModel:
    """A float32 model of the target's class with copies of `layers`, ascending. It predicts badly
    until it is trained, but its tables are the target's, which a new draft spends most of a short
    training on."""
    chosen = list(layers)
    if (
        not chosen
        or chosen != sorted(set(chosen))
        or not 0 <= chosen[0] <= chosen[-1] < target.num_layers
    ):
        raise UserError(
            f"option 'draft_lm.target_layers' is {chosen}; give ascending layers between 0 and "
            f"{target.num_layers - 1}"
        )
    config = pruned_config(target, chosen)
    model = build_model(
        config,
        trust_remote_code=target.trust_remote_code,
        attn_implementation=implementation(config, register()),
        dtype=torch.float32,
    )
    state = pruned_state(target, chosen)
    if missing := sorted(model.state_dict().keys() - state.keys()):
        raise UserError(
            f"option 'draft_lm.target_layers' is {chosen}, but {missing[0]!r} of {target.name!r} "
            "is quantised in a way that cannot be read; give draft_lm.init or draft_lm.hidden_size"
        )
    model.load_state_dict({name: state[name] for name in model.state_dict()})
    model.generation_config = copy.deepcopy(target.model.generation_config)
    return model.to(target.device).eval()


def pruned_config(target: Target, layers: Sequence[int]) -> PreTrainedConfig:
    config = copy.deepcopy(target.model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the copies are numbers
    text = config.get_text_config()
    text.num_hidden_layers = len(layers)
    if getattr(text, "layer_types", None):
        # Sliding and full attention alternate in some families: every layer keeps its kind.
        text.layer_types = [text.layer_types[layer] for layer in layers]
    return config


def pruned_state(target: Target, layers: Sequence[int]) -> dict[str, torch.Tensor]:
    stack = (
        next(name for name, module in target.model.named_modules() if module is target.layers) + "."
    )
    state = {}
    for name, tensor in _plain_state(target).items():
        if name.startswith(stack):
            number, _, rest = name.removeprefix(stack).partition(".")
            if int(number) not in layers:
                continue
            name = f"{stack}{layers.index(int(number))}.{rest}"
        state[name] = whole(tensor).float()
    return state


def _plain_state(target: Target) -> dict[str, torch.Tensor]:
    """The target's state; of quantised weights the numbers that they stand for."""
    model = target.model
    return numbers_of(model) if quantisation(model.config) else model.state_dict()
