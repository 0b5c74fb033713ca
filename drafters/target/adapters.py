"""LoRA adapters of a target: read by peft, taken off the model again, and applied to the tokens of
the requests that ask for them.

The model stays as it was loaded: its captured forward, its revision and what drafts share with
it are the base's. peft's own forward is what every adapter is compared with when it is loaded.

The other tokens' outputs stay those of the layer, bit by bit. Legend: T tokens of the pass.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from draftsmith.drafters.target.probe import TOLERANCE, packed_logits
from draftsmith.drafters.target.target import Target, revision_of
from draftsmith.errors import UserError, first_line

NUM_TOKENS = 12  # of the text that an adapter is compared on
QUANTISED = ("Linear4bit", "Linear8bitLt")  # peft's layers over bitsandbytes
MISSING = "missing adapter keys"  # in peft's warning


class Adapters:
    """Adapters by name, of one target."""

    def __init__(self, target: Target):
        self.target = target
        self.names: list[str] = []
        self._layers: dict[str, LayerDeltas] = {}
        self._now = AdaptedTokens()

    @classmethod
    def load(cls, target: Target, folders: Mapping[str, str]) -> Adapters:
        """Folders or Hub ids by name. Raises `UserError` for one that is no LoRA adapter of this
        target, or that changes more than its linear layers."""
        if target.state_layers:
            raise UserError(
                f"lora is given with {target.name!r}, whose layers with a state read a pass in "
                "pieces; merge the adapter into the target"
            )
        adapters = cls(target)
        for name, folder in folders.items():
            adapters.add(name, folder)
        return adapters

    @torch.no_grad()
    def add(self, name: str, folder: str) -> None:
        ids = _probe_ids(self.target)
        base = revision_of(self.target.model)
        deltas, expected = _read(self.target, name, folder, ids)
        if revision_of(self.target.model) != base:
            # PiSSA, OLoRA and their kin take their start out of the weights.
            raise _refusal(name, folder, "it changes weights of the target, which requests share")
        for layer, delta in deltas.items():
            if layer not in self._layers:
                self._layers[layer] = LayerDeltas(self._now)
                module = self.target.model.get_submodule(layer)
                module.register_forward_hook(self._layers[layer])
            self._layers[layer].deltas[name] = delta
        self.names.append(name)
        self._check(name, folder, ids, expected)

    @contextmanager
    def of(self, tokens: Mapping[str, torch.Tensor], num_tokens: int) -> Iterator[None]:
        """Applies adapters within the next passes of the target.

        Args:
            tokens: [n] int64 indices by adapter, among the `num_tokens` of the pass.
        """
        self._now.tokens, self._now.num_tokens = tokens, num_tokens
        try:
            with self.target.own_forward():
                yield
        finally:
            self._now.tokens = {}

    def _check(self, name: str, folder: str, ids: torch.Tensor, expected: torch.Tensor) -> None:
        """Compares a text of the adapter and one of the base in one pass with peft's forward, and
        with the base's alone."""
        base = self._packed(ids.flip(1))
        size = ids.shape[1]
        tokens = {name: torch.arange(size, device=ids.device)}
        try:
            with self.of(tokens, 2 * size):
                mixed = self._packed(ids, ids.flip(1))
        except RuntimeError as error:
            reason = f"it cannot be applied to single tokens ({error})"
            raise _refusal(name, folder, reason) from error
        for actual, wanted in zip(mixed.split(size, dim=1), (expected, base), strict=True):
            spread = wanted.float().std() + 1e-6
            apart = (actual - wanted).abs().amax(dim=-1).median() / spread
            if apart.item() > TOLERANCE[self.target.dtype]:
                raise _refusal(name, folder, "its text beside others is not what peft gives alone")

    def _packed(self, *texts: torch.Tensor) -> torch.Tensor:
        """[1, T, V] logits of one pass over several texts of one length."""
        positions = torch.arange(NUM_TOKENS, device=self.target.device)
        with self.target.own_forward():
            return packed_logits(self.target, *((text, positions) for text in texts))


def _read(
    target: Target, name: str, folder: str, ids: torch.Tensor
) -> tuple[dict[str, Delta], torch.Tensor]:
    """Changes by name of the layer, and logits [1, T, V] of peft's own forward."""
    from peft import PeftConfig, PeftModel

    try:
        settings = PeftConfig.from_pretrained(folder)
        kind = str(settings.peft_type).rpartition(".")[2]
        if kind != "LORA":
            raise _refusal(name, folder, f"it is a {kind} adapter, not LoRA")
        for key in ("bias", "layer_replication"):
            # peft writes such changes into the model and leaves them there.
            if (value := getattr(settings, key, None)) not in (None, "none", []):
                raise _refusal(name, folder, f"its {key} is {value!r}, more than a plain LoRA")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            peft = PeftModel.from_pretrained(target.model, folder)
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # readers of torn files raise classes of their own
        raise _refusal(name, folder, f"it does not load ({first_line(error)})") from error
    try:
        if any(MISSING in str(warning.message) for warning in caught):
            raise _refusal(name, folder, "weights of it are missing")
        expected = target.model(input_ids=ids, use_cache=False).logits
        return _deltas(peft.base_model.model, name, folder), expected
    finally:
        peft.unload()
        target.model.requires_grad_(False)


def _deltas(model: nn.Module, name: str, folder: str) -> dict[str, Delta]:
    from peft.tuners.lora import Linear
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    found: dict[str, Delta] = {}
    head = model.get_output_embeddings()
    for layer, module in model.named_modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            raise _refusal(name, folder, f"it replaces {layer!r}, which requests share")
        if not isinstance(module, BaseTunerLayer):
            continue
        plain = isinstance(module, Linear) or type(module).__name__ in QUANTISED
        (own,) = module.active_adapters
        if not plain or module is head or own in module.lora_variant:
            raise _refusal(name, folder, f"it changes {layer!r} by more than a plain LoRA")
        found[layer] = Delta(module.lora_A[own], module.lora_B[own], float(module.scaling[own]))
    return found


def _probe_ids(target: Target) -> torch.Tensor:
    upper = min(target.vocab_size, len(target.model.get_input_embeddings().weight))
    generator = torch.Generator().manual_seed(0)
    return torch.randint(upper, (1, NUM_TOKENS), generator=generator).to(target.device)


def _refusal(name: str, folder: str, reason: Any) -> UserError:
    return UserError(f"lora {name!r} ({folder}) cannot be served: {reason}; use another adapter")


class Delta(NamedTuple):
    """One adapter's change of one layer: `b(a(x)) * scaling`, as peft computes it."""

    a: nn.Module
    b: nn.Module
    scaling: float

    def added(
        self, inputs: torch.Tensor, output: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        """`output` [..., T, out] with the change of `tokens` [n] added."""
        chosen = inputs.index_select(-2, tokens).to(next(self.a.parameters()).dtype)
        own = output.index_select(-2, tokens)
        changed = own + self.b(self.a(chosen)) * self.scaling
        return output.index_copy(-2, tokens, changed.to(output.dtype))


@dataclass
class AdaptedTokens:
    """Tokens of the present pass by adapter; of no adapter outside `Adapters.of`. The hooks hold
    this alone: by way of the target they would keep its weights alive."""

    tokens: Mapping[str, torch.Tensor] = field(default_factory=dict)
    num_tokens: int = 0


class LayerDeltas:
    """A forward hook of one linear layer that adds the changes of the pass's adapters."""

    def __init__(self, now: AdaptedTokens):
        self.now = now
        self.deltas: dict[str, Delta] = {}

    def __call__(self, layer: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> Any:
        for name, tokens in self.now.tokens.items():
            delta = self.deltas.get(name)
            if delta is None:
                continue
            if inputs[0].shape[-2] != self.now.num_tokens:
                raise RuntimeError(
                    f"a {type(layer).__name__} reads {inputs[0].shape[-2]} of the "
                    f"{self.now.num_tokens} tokens of a pass"
                )
            output = delta.added(inputs[0], output, tokens)
        return output
