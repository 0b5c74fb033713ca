"""Taps: hidden states read from a model's decoder layers by hooks, only those asked for, only
during one forward pass.

Raw id k, 0 <= k < L, is the input of layer k; raw L is the output of the last layer, before the
final norm; `FINAL` is what the model's head multiplies (after that norm).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from draftsmith.errors import UserError

FINAL = -1


def body_name(model: PreTrainedModel) -> str:
    """The attribute of a causal LM with its body. In some models it is another than their class
    says (Llama 4)."""
    named = (model.base_model_prefix, "model", "transformer")
    found = next((name for name in named if name in model._modules), None)
    if found is None:
        raise UserError(f"{type(model).__name__} has no body beside its head; use another model")
    return found


def decoder_layers(body: torch.nn.Module, num_layers: int) -> torch.nn.ModuleList:
    """The first `ModuleList` of the right length; transformers names it differently in every
    family."""
    for module in body.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == num_layers:
            return module
    raise UserError(
        f"{type(body).__name__} has no list of {num_layers} decoder layers to tap; use another "
        "target"
    )


def check_draft_taps(taps: Sequence[int], num_layers: int) -> None:
    """Raises `UserError` for taps of a new draft that engines would not hand over as they are."""
    most = max(1, num_layers - 1)
    if list(taps) != sorted(set(taps)) or not 1 <= taps[0] <= taps[-1] <= most:
        raise UserError(
            f"option 'draft.taps' is {' '.join(map(str, taps))}; give ascending layers from 1 to "
            f"{most}, each once"
        )


def check_taps(taps: Sequence[int], num_layers: int) -> None:
    for tap in taps:
        if tap != FINAL and not 0 <= tap <= num_layers:
            raise UserError(
                f"tap {tap} does not exist in a target of {num_layers} layers; give raw ids from "
                f"0 to {num_layers}"
            )


@contextmanager
def captured(layers: torch.nn.ModuleList, taps: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
    """Yields a dict that a forward pass inside the block fills with the hidden state of every raw
    id in `taps`."""
    states: dict[int, torch.Tensor] = {}
    handles = []
    for tap in set(taps) - {FINAL}:
        if tap < len(layers):
            handles.append(
                layers[tap].register_forward_pre_hook(_keep_input(states, tap), with_kwargs=True)
            )
        else:
            handles.append(layers[-1].register_forward_hook(_keep_output(states, tap)))
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


def _keep_input(states: dict[int, torch.Tensor], tap: int) -> Any:
    def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states[tap] = args[0] if args else kwargs["hidden_states"]

    return hook


def _keep_output(states: dict[int, torch.Tensor], tap: int) -> Any:
    def hook(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        states[tap] = output[0] if isinstance(output, tuple) else output

    return hook
