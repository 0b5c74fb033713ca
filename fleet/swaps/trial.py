"""One pass of a draft before it is served: over tokens and hidden states of recent steps, and fixed
ones, which stand for them before any traffic too.

Every token is a text of its own: its attention is its own value, so that no request's keys and
values are read or written. Every linear layer, norm and table is run by the kernels that will
serve. By the engine's thread only.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from draftsmith.fleet.swaps.checks import DraftRefused
from draftsmith.fleet.swaps.packed import tensor_digest
from draftsmith.fleet.swaps.proposer import SwappedProposer
from draftsmith.fleet.swaps.recent import NUM_KEPT

# Those of recent steps are the first `NUM_KEPT` of them. The number is the same on all ranks.
NUM_TOKENS = 2 * NUM_KEPT


def trial(proposer: SwappedProposer, model: torch.nn.Module) -> str:
    """Digest of the logits. Raises `DraftRefused` where a hidden state or a logit is NaN or
    infinite; -inf stands for tokens outside the draft's vocabulary."""
    with (
        torch.inference_mode(),
        proposer.attached(model),
        attention_alone(model) as broken,
        proposer.forward_context(NUM_TOKENS),
    ):
        inputs = inputs_of(proposer, model)
        output = model(**inputs)
        hidden = output[0] if isinstance(output, tuple) else output
        logits = model.compute_logits(hidden)
    tables = logits if isinstance(logits, list) else [logits]
    if broken:
        raise DraftRefused("the draft's keys or values on the trial's tokens are not finite")
    for state in output if isinstance(output, tuple) else (output,):
        if isinstance(state, torch.Tensor) and not bool(torch.isfinite(state).all()):
            raise DraftRefused("the draft's hidden states on the trial's tokens are not finite")
    for table in tables:
        # Ranks of a tensor-parallel group other than the first get no logits.
        if table is not None and not _is_proper(table):
            raise DraftRefused("the draft's logits on the trial's tokens are not finite")
    return "".join(tensor_digest(table.float())[:16] for table in tables if table is not None)


@contextmanager
def attention_alone(model: torch.nn.Module) -> Iterator[list[torch.nn.Module]]:
    """Layers that keep keys and values answer for texts of one token: without metadata vLLM leaves
    their output as the memory was. The list takes those with an input that is not finite; an error
    in the middle of a pass would leave the other ranks in it."""
    broken: list[torch.nn.Module] = []

    def alone(layer: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        given = [one for one in inputs if isinstance(one, torch.Tensor)]
        if not all(bool(torch.isfinite(one).all()) for one in given):
            broken.append(layer)
        return own_value(layer, given, output) if isinstance(output, torch.Tensor) else None

    layers = [one for one in model.modules() if hasattr(one, "kv_cache")]
    hooks = [layer.register_forward_hook(alone) for layer in layers]
    try:
        yield broken
    finally:
        for hook in hooks:
            hook.remove()


def own_value(
    layer: torch.nn.Module, inputs: Sequence[torch.Tensor], output: torch.Tensor
) -> torch.Tensor:
    """Value of each token, repeated for the query heads of its group; zeros where the layer's
    inputs are others than query, key and value."""
    heads, groups = getattr(layer, "num_heads", 0), getattr(layer, "num_kv_heads", 0)
    if len(inputs) != 3 or not groups:
        return torch.zeros_like(output)
    value = inputs[2].reshape(len(inputs[2]), groups, -1).repeat_interleave(heads // groups, 1)
    fits = value.numel() == output.numel()
    return value.reshape(output.shape) if fits else torch.zeros_like(output)


def _is_proper(logits: torch.Tensor) -> bool:
    finite = torch.isfinite(logits)
    return bool(finite.any(-1).all() and (finite | (logits == -torch.inf)).all())


def inputs_of(proposer: SwappedProposer, model: torch.nn.Module) -> dict[str, Any]:
    """Arguments of the module's own `forward`, by its names."""
    generator = torch.Generator().manual_seed(0)
    device, dtype = proposer.device, proposer.dtype
    vocab_size = proposer.model_config.get_vocab_size()
    taps = _aux_width(model) if hasattr(model, "combine_hidden_states") else 0
    width = taps or int(getattr(proposer.kind.side(proposer.runner), "hidden_size", 1))
    tokens = torch.randint(vocab_size, (NUM_TOKENS,), generator=generator).int().to(device)
    states = torch.randn(NUM_TOKENS, width, generator=generator).to(device, dtype)
    proposer.recent.put(tokens, states, vocab_size=vocab_size)
    known: dict[str, Any] = {
        "input_ids": tokens,
        "positions": torch.arange(NUM_TOKENS, device=device),
        "hidden_states": model.combine_hidden_states(states) if taps else states,
        "inputs_embeds": None,
    }
    return {
        name: known[name] for name in inspect.signature(model.forward).parameters if name in known
    }


def _aux_width(model: torch.nn.Module) -> int:
    """Width of the target's taps side by side; 0 for a draft that takes none."""
    inner = getattr(model, "model", None)
    if not getattr(inner, "use_aux_hidden_state", False):
        return 0
    return int(getattr(inner, "fc_input_size", 0))


def derived(
    proposer: SwappedProposer, model: torch.nn.Module
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tensors that the proposer computed from the draft's weights at the start, and their values
    for another draft: the state that stands for masked positions in parallel drafting."""
    held = getattr(
        getattr(proposer.runner, "drafter", None), "parallel_drafting_hidden_state_tensor", None
    )
    mask = getattr(model, "mask_hidden", None)
    if held is None or mask is None:
        return []
    with torch.inference_mode():
        value = mask.view(-1)
        if hasattr(model, "combine_hidden_states") and _aux_width(model):
            value = model.combine_hidden_states(value)
    return [(held, value.clone())]
