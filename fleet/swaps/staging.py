"""Second copy of a draft, into which a thread loads versions while the engine serves.

The engine's thread is disturbed by nothing but Python's lock, which is given back between tensors.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from draftsmith.drafters.weights import read_weights
from draftsmith.errors import UserError, first_line
from draftsmith.fleet.swaps.checks import DraftRefused, check_like
from draftsmith.fleet.swaps.packed import (
    NotSwappable,
    Slots,
    check_made,
    check_pairs,
    slots_of,
    tensor_digest,
    tensors_in,
)
from draftsmith.fleet.swaps.proposer import NUM_KEPT, SwappedProposer, restore, snapshot
from draftsmith.kernels.dispatch import pins

# Time for the engine's thread after each tensor, and the longest that it waits for Python's lock.
REST_S = 0.001
LOCK_S = 0.0005


@dataclass
class Loaded:
    """A version in the second copy.

    Attributes:
        digests: by slot, of tensors; the trial adds those of handles
        changed: names of the slots that differ from the served ones
        backup: values of the served tensors that change
        derived: tensors of the proposer beside the module, and their new values
    """

    version: str
    slots: Slots
    digests: dict[str, str]
    changed: list[str]
    backup: dict[str, torch.Tensor]
    derived: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)


class Staging:
    def __init__(self, proposer: SwappedProposer):
        self.proposer = proposer
        self.model = proposer.second()
        check_pairs(self.served(), self.slots())

    def served(self) -> Slots:
        return slots_of(self.proposer.model, self.proposer.foreign)

    def slots(self) -> Slots:
        return slots_of(self.model, ())

    def load(self, folder: Path, version: str) -> Loaded:
        """Check a version and load it beside the served one. Raises `UserError`; the second copy
        then holds what it held."""
        proposer = self.proposer
        check_like(folder, proposer.folder, is_part=proposer.is_inside_target)
        # All are read, and found finite, before the first is loaded.
        tensors = read_weights(folder)
        check_shared(proposer, tensors)
        self._put(tensors)
        slots, served = self.slots(), self.served()
        check_pairs(served, slots)
        staged_tensors, served_tensors = tensors_in(slots), tensors_in(served)
        digests = {name: tensor_digest(one) for name, one in staged_tensors.items()}
        changed = [
            name for name, one in served_tensors.items() if tensor_digest(one) != digests[name]
        ]
        return Loaded(
            version=version,
            slots=slots,
            digests=digests,
            changed=changed,
            backup={name: served_tensors[name].detach().clone() for name in changed},
        )

    def _put(self, tensors: Mapping[str, torch.Tensor]) -> None:
        saved = snapshot(self.model)
        try:
            with short_turns(), on_device(self.proposer.device):
                self.proposer.load(self.model, rested(tensors.items()))
                put_plain_buffers(self.model, tensors)
            for module, attributes in saved:
                check_made(attributes, module)
        except (UserError, NotSwappable):
            restore(saved)
            raise
        except Exception as error:
            restore(saved)
            raise DraftRefused(f"vLLM's loader refused it: {first_line(error)}") from error


def check_shared(proposer: SwappedProposer, tensors: Mapping[str, torch.Tensor]) -> None:
    """Tables that the served draft takes from the target cannot change with a version."""
    names = [name for name in tensors if proposer.is_shared(name)]
    if not names or proposer.is_inside_target:
        return
    served = read_weights(proposer.folder)
    for name in names:
        if not torch.equal(tensors[name], served[name]):
            raise DraftRefused(
                f"{name!r} is another one, and the served draft shares it with the target; start "
                "the engine with this draft instead"
            )


def put_plain_buffers(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Buffers that a module's `load_weights` writes itself, which a reload by layers passes by."""
    for name in model._non_persistent_buffers_set & tensors.keys():
        buffer = model._buffers[name]
        assert buffer is not None
        with torch.no_grad():
            buffer.copy_(tensors[name].view_as(buffer))


def rested(items: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    for item in items:
        yield item
        time.sleep(REST_S)


@contextmanager
def short_turns() -> Iterator[None]:
    """A short interval after which a waiting thread gets Python's lock."""
    kept_s = sys.getswitchinterval()
    sys.setswitchinterval(min(kept_s, LOCK_S))
    try:
        yield
    finally:
        sys.setswitchinterval(kept_s)


@contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """On a GPU a stream of its own, finished at the end."""
    if not pins(device):
        yield
        return
    torch.cuda.set_device(device)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


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
