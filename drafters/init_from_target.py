"""Making, saving and filling of drafts that are modules, tables that one shares with its target or
brings itself, and initial values that a new one takes from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig

from draftsmith.drafters.target.quantised import numbers_of
from draftsmith.drafters.target.sharded import gathered
from draftsmith.drafters.target.taps import FINAL
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.weights import load_into, write_weights
from draftsmith.errors import UserError
from draftsmith.kernels.attention.pool import LayerShape, PagedPool

if TYPE_CHECKING:
    from typing_extensions import Self

PROBE_ROWS, PROBE_LENGTH = 4, 64


MASK = "mask_embedding"


class NewDraft(nn.Module):
    @classmethod
    def create(
        cls, options: Any, target: Target, *, seed: int, token_counts: torch.Tensor | None = None
    ) -> Self:
        """A draft whose weights depend on the seed alone, and no other random numbers on them."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return cls.new(options, target, token_counts)

    @classmethod
    def new(cls, options: Any, target: Target, token_counts: torch.Tensor | None) -> Self:
        """`token_counts` is what a head over part of the vocabulary needs; the others are the
        target's own."""
        raise NotImplementedError


class PortableDraft(NewDraft):
    """A draft that is saved as its `portable_config` and its tensors, under names that engines
    read."""

    def portable_tensors(self) -> dict[str, torch.Tensor]:
        return self.state_dict()

    def save(self, folder: Path) -> None:
        write_weights(folder, self.portable_config(), self.portable_tensors())

    def filled(self, tensors: Mapping[str, torch.Tensor], folder: Path) -> Self:
        """The draft with the weights of a folder, in the type of its first matrix there."""
        own = self.named_parameters()
        first = next(name for name, weight in own if weight.ndim > 1 and "." in name)
        self.to(tensors[first].dtype if first in tensors else torch.float32)
        load_into(self, tensors, str(folder))
        return self


class OwnTables(NamedTuple):
    draft_vocab_size: int | None = None  # rows of its own head; None: the target's head
    is_subset: bool = False  # whether d2t says which tokens these are
    embeddings: bool = False
    mask_embedding: bool = False

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> OwnTables:
        head = tensors.get("lm_head.weight")
        return cls(
            None if head is None else len(head),
            "d2t" in tensors,
            "embed_tokens.weight" in tensors,
            MASK in tensors,
        )

    def add_to(self, module: nn.Module, config: PreTrainedConfig) -> None:
        """Sets the module's attributes; those it lacks are None. None is trained before
        a family says so."""
        size, rows = config.hidden_size, self.draft_vocab_size
        module.lm_head = None if rows is None else nn.Linear(size, rows, bias=False)
        module.embed_tokens = nn.Embedding(config.vocab_size, size) if self.embeddings else None
        for own in (module.lm_head, module.embed_tokens):
            if own is not None:
                own.requires_grad_(False)
        subset = torch.zeros(rows or 0, dtype=torch.int64) if self.is_subset else None
        module.register_buffer("d2t", subset)
        module.register_buffer(MASK, torch.zeros(size) if self.mask_embedding else None)


class LayeredDraft(PortableDraft):
    """A draft of decoder layers with their own keys and values, whose embeddings and head are its
    `_target`'s, frozen and not part of the module, but for those of `OwnTables`.

    The rotary frequencies are on the module's device, in float32 whatever it is cast to (rounded,
    they would move every position), and not in its state dict.
    """

    _rotary: tuple[nn.Module, ...] = ()  # a tuple keeps it out of the module's parts

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        for rotary in self._rotary:
            rotary._apply(lambda tensor: tensor.to(fn(tensor).device))
        return self

    @property
    def max_positions(self) -> int:
        return self.config.max_position_embeddings

    def cache_shapes(self) -> list[LayerShape]:
        """Keys and values of each layer."""
        heads, dim = self.config.num_key_value_heads, self.config.head_dim
        return [LayerShape(heads, dim, dim)] * self.config.num_hidden_layers

    def new_pool(
        self, num_blocks: int, block_size: int, device: torch.device, dtype: torch.dtype
    ) -> PagedPool:
        return PagedPool.of_layers(self.cache_shapes(), num_blocks, block_size, device, dtype)

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    @property
    def vocab_map(self) -> torch.Tensor | None:
        """[Vd]; on disk d2t holds offsets: target id = i + d2t[i]."""
        if self.d2t is None:
            return None
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def head_weight(self) -> torch.Tensor:
        if self.lm_head is not None:
            return self.lm_head.weight
        return self._target.output_weight.to(self.dtype)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """[...] -> [..., H]."""
        embeds = self._target.embed(ids) if self.embed_tokens is None else self.embed_tokens(ids)
        return embeds.to(self.dtype)

    def begin_embeddings(self) -> None:
        """Fill a table of its own with the target's embeddings."""
        if self.embed_tokens is not None:
            every = torch.arange(self._target.vocab_size, device=self._target.device)
            self.embed_tokens.weight.data.copy_(self._target.embed(every))


def check_map(offsets: torch.Tensor, num_draft: int, vocab_size: int, folder: Path) -> None:
    """Raises `UserError` for a d2t that no draft vocabulary has."""
    ids = torch.arange(len(offsets)) + offsets
    if (
        len(ids) != num_draft
        or ids.min() < 0
        or ids.max() >= vocab_size
        or len(ids.unique()) != len(ids)
    ):
        raise UserError(
            f"d2t of {str(folder)!r} does not map draft tokens to distinct target ids; restore or "
            "train the draft again"
        )


def shares_embeddings(target: Target) -> bool:
    """True where the input embedding is a plain table. One that also scales (Gemma) would be read
    differently by every engine, so a draft of such a target keeps a table of its own with the scale
    in it."""
    return type(target.model.get_input_embeddings()) is torch.nn.Embedding


@torch.no_grad()
def fitted_norm(target: Target) -> torch.Tensor:
    """[H], the gains of an RMS norm that comes nearest to the target's last norm, by least squares
    over a few random texts.

    Families name this norm differently and shape it differently (1 + gain, or a mean taken off);
    its effect is what counts.
    """
    taps = probed(target, (target.num_layers, FINAL))
    before, after = taps.double().chunk(2, dim=-1)
    return _gains(before, after)


@torch.no_grad()
def probed(target: Target, taps: tuple[int, ...]) -> torch.Tensor:
    """[T, n * H], the taps of a few random texts."""
    length = min(PROBE_LENGTH, target.max_positions)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(len(target.output_weight), (PROBE_ROWS, length), generator=generator).to(
        target.device
    )
    return target.states(ids, torch.ones_like(ids), taps)[0].flatten(0, 1)


@torch.no_grad()
def adopt_layer(
    layer: torch.nn.Module,
    attention: torch.nn.Module,
    mlp: torch.nn.Module,
    *,
    attention_norm: torch.nn.Module,
    mlp_norm: torch.nn.Module,
) -> None:
    """Copies a decoder layer of the target wherever name and shape agree with our layer's; the rest
    stays as it was. Of a quantised layer the numbers are copied, never the codes.

    A projection that also reads the embedding takes the target's as the half that reads the state.
    Norms take the effective gains of the target's: `attention_norm` and `mlp_norm` are before these
    two.
    """
    norms = {
        "input_layernorm": attention_norm,
        "post_attention_layernorm": mlp_norm,
        # Where Gemma has it, the one before norms what attention gives.
        "pre_feedforward_layernorm": mlp_norm,
        **{
            f"self_attn.{name}": own
            for name, own in attention.named_children()
            if name in ("q_norm", "k_norm")
        },
    }
    with gathered(layer) as whole:
        theirs = numbers_of(whole)
        for prefix, module in (("self_attn", attention), ("mlp", mlp)):
            for name, own in module.named_parameters():
                found = theirs.get(f"{prefix}.{name}")
                if (
                    found is not None
                    and found.shape[0] == own.shape[0]
                    and own.shape[-1] in (found.shape[-1], 2 * found.shape[-1])
                ):
                    own[..., -found.shape[-1] :] = found
        modules = dict(whole.named_modules())
        for name, own in norms.items():
            # OLMo 2 norms the queries of all heads together.
            if name in modules and all(
                found.shape == own.weight.shape for found in modules[name].parameters()
            ):
                own.weight.copy_(gains(modules[name], len(own.weight)))


def adopt_layers(target: Target, layers: Sequence[torch.nn.Module]) -> None:
    """Makes these some of the target's layers, from its first, which reads embeddings, to its last,
    which the head reads.

    A block needs it: random layers add so little to the stream that the mask token's own embedding
    outweighs them, which the head reads as a token that no text holds. On the quickstart's target
    the first loss was 34 nats, and is 4 to 6 this way.
    """
    for layer, index in zip(layers, spread(len(layers), target.num_layers), strict=True):
        adopt_layer(
            target.layers[index], layer.self_attn, layer.mlp,
            attention_norm=layer.input_layernorm, mlp_norm=layer.post_attention_layernorm,
        )  # fmt: skip


def spread(count: int, size: int) -> list[int]:
    """`count` indices from the first to the last of `size`; one alone is the last."""
    steps = max(1, count - 1)
    return [size - 1 - (steps - step) * (size - 1) // steps for step in range(steps + 1)][-count:]


@torch.no_grad()
def average_taps(fc: torch.nn.Linear) -> None:
    """[H, n * H] with a tenth of the random weights it has, so that the taps may come to differ."""
    size = fc.out_features
    num_taps = fc.in_features // size
    average = torch.eye(size, device=fc.weight.device).repeat(1, num_taps) / num_taps
    fc.weight.mul_(0.1).add_(average)


def gains(norm: torch.nn.Module, size: int) -> torch.Tensor:
    """[size], what an RMS norm's weight must be to act like `norm` (some store 1 less), by least
    squares on random states."""
    parameter = next(norm.parameters(), torch.empty(0))  # OLMo's has none
    states = torch.randn(64, size, generator=torch.Generator().manual_seed(0)).to(parameter)
    return _gains(states.double(), norm(states).double())


def _gains(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    normed = before * torch.rsqrt(before.pow(2).mean(dim=-1, keepdim=True) + 1e-6)
    return (after * normed).sum(dim=0) / normed.pow(2).sum(dim=0).clamp(min=1e-12)


def frequent_tokens(
    token_counts: torch.Tensor | None, size: int, always: Sequence[int]
) -> torch.Tensor:
    """[size] ascending ids of the most frequent tokens; those of `always` are in whatever their
    count. Ties: the lower id."""
    if token_counts is None:
        raise UserError(
            "a draft vocabulary is chosen by frequency in the training data; give data or leave "
            "draft_vocab_size out"
        )
    if size < max(1, len(always)):
        raise UserError(
            f"option 'draft_vocab_size' is {size}; it must be at least {max(1, len(always))}"
        )
    counts = token_counts.double().cpu().clone()
    counts[list(always)] = torch.inf
    return counts.argsort(descending=True, stable=True)[:size].sort().values.to(token_counts.device)


def unused_token(target: Target) -> int:
    """An id that no text holds, for the slots to be drafted: the tokenizer's mask token, else one
    it does not use, else padding, else the last id."""
    tokenizer = target.tokenizer()
    if tokenizer.mask_token_id is not None:
        return tokenizer.mask_token_id
    if len(tokenizer) < target.vocab_size or tokenizer.pad_token_id is None:
        return target.vocab_size - 1
    return tokenizer.pad_token_id


def checked_mask_token(target: Target, wanted: int | None) -> int:
    mask_token = unused_token(target) if wanted is None else wanted
    if not 0 <= mask_token < target.vocab_size:
        raise UserError(
            f"option 'mask_token' is {mask_token}; {target.name!r} has the ids 0 to "
            f"{target.vocab_size - 1}"
        )
    return mask_token
