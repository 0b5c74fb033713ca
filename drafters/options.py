"""Shapes of new drafts, one dataclass a family. What is left out follows the target. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from draftsmith.config import AT_LEAST_1, NOT_NEGATIVE, POSITIVE, SHARE, Limits, option

# More are in no draft, and would fill any memory.
LAYERS, HEADS, WIDTH = (Limits(1, most, "[]") for most in (256, 1024, 2**18))
WINDOW = "attend to the last so many positions alone [default: to all]"


@dataclass(frozen=True, kw_only=True)
class Eagle3Options:
    """One decoder layer over a few taps of the target."""

    taps: tuple[int, ...] | None = option(
        None,
        "raw ids of the tapped layers, ascending, 1 to L-1 [default: 2, L//2, L-3, as engines "
        "take it]",
        limits=AT_LEAST_1,
    )
    draft_vocab_size: int | None = option(
        None, "draft only the most frequent tokens of the data [default: all]", limits=AT_LEAST_1
    )
    intermediate_size: int | None = option(
        None, "width of the MLP [default: the target's]", limits=WIDTH
    )
    num_attention_heads: int | None = option(
        None, "attention heads [default: the target's]", limits=HEADS
    )
    num_key_value_heads: int | None = option(
        None, "key and value heads [default: the target's]", limits=HEADS
    )
    head_dim: int | None = option(None, "width of a head [default: the target's]", limits=HEADS)
    train_head: bool = option(
        True, "train the output head; false keeps the target's, for less memory and time a step"
    )
    norm_before_residual: bool = option(
        False, "start the residual stream from the normed state (vLLM only)"
    )
    fc_norm: bool = option(False, "norm every tap before they are joined (EAGLE-3.1)")
    norm_output: bool = option(False, "feed the normed state back while drafting (EAGLE-3.1)")
    window: int | None = option(None, WINDOW, limits=AT_LEAST_1)


@dataclass(frozen=True, kw_only=True)
class PeagleOptions(Eagle3Options):
    """EAGLE-3 that drafts all positions in one pass."""

    num_hidden_layers: int = option(
        4, "decoder layers; those after the first are plain", limits=LAYERS
    )
    mask_token: int | None = option(
        None,
        "id in the slots to be drafted, best one that no text holds [default: found]",
        limits=NOT_NEGATIVE,
    )


@dataclass(frozen=True, kw_only=True)
class MtpOptions:
    """Decoder layers of the target's shape over its final state: one, applied again and again, or
    one for each drafted token. Another width of the MLP cannot be stitched for engines."""

    intermediate_size: int | None = option(
        None, "width of the MLP [default: the target's]", limits=WIDTH
    )
    modules: int = option(
        1,
        "one for each drafted token, where targets may have several (DeepSeek-V3, GLM-4.5)",
        limits=LAYERS,
    )
    window: int | None = option(None, WINDOW, limits=AT_LEAST_1)


@dataclass(frozen=True, kw_only=True)
class Eagle1Options:
    """One decoder layer of the target's width over its final state."""

    intermediate_size: int | None = option(
        None, "width of the MLP [default: the target's]", limits=WIDTH
    )
    window: int | None = option(None, WINDOW, limits=AT_LEAST_1)


@dataclass(frozen=True, kw_only=True)
class MedusaOptions:
    """Small heads on the target's final state, one a draft position."""

    num_heads: int = option(4, "heads: tokens that can be drafted", limits=LAYERS)
    num_layers: int = option(1, "residual blocks of a head", limits=LAYERS)


@dataclass(frozen=True, kw_only=True)
class MlpOptions:
    """A recurrent network of one layer over the target's final state and the drafted tokens, with
    tied weights."""

    num_predict: int = option(4, "tokens that can be drafted", limits=LAYERS)
    inner_size: int | None = option(
        None, "width of its state [default: the target's]", limits=WIDTH
    )
    scale_input: bool = option(True, "norm the target's state before it is read")


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    rank: int = option(
        16, "rank of the adapters on every linear layer of the decoder", limits=AT_LEAST_1
    )
    alpha: float = option(
        32.0, "scale of the adapters; their output is multiplied by alpha / rank", limits=POSITIVE
    )


@dataclass(frozen=True, kw_only=True)
class DraftLmOptions:
    """A causal LM of its own: an existing one, layers of the target, or a new Llama of the given
    shape over its vocabulary."""

    init: str | None = option(
        None, "folder or Hub id of a causal LM to start from [default: a new one]"
    )
    target_layers: tuple[int, ...] | None = option(
        None,
        "instead: these layers of the target, with its embeddings, norm and head",
        limits=NOT_NEGATIVE,
    )
    num_layers: int = option(2, "layers of a new draft", limits=LAYERS)
    hidden_size: int | None = option(
        None, "width of a new draft [default: half the target's]", limits=WIDTH
    )
    intermediate_size: int | None = option(
        None, "width of a new draft's MLP [default: 3 times its own width]", limits=WIDTH
    )
    num_attention_heads: int | None = option(
        None, "attention heads of a new draft [default: one for 64 of its width]", limits=HEADS
    )
    num_key_value_heads: int | None = option(
        None, "key and value heads of a new draft [default: its attention heads]", limits=HEADS
    )
    window: int | None = option(None, f"of a new draft: {WINDOW}", limits=AT_LEAST_1)
    lora: LoraOptions | None = option(
        None, "train low-rank adapters of `init` only; they are merged when the draft is saved"
    )


@dataclass(frozen=True, kw_only=True)
class DflashOptions:
    """A few layers that draft a block in one pass."""

    taps: tuple[int, ...] | None = option(
        None,
        "raw ids of the tapped layers, ascending, 1 to L-1 [default: 2, L//2, L-3]",
        limits=AT_LEAST_1,
    )
    num_layers: int = option(2, "decoder layers", limits=LAYERS)
    block_size: int = option(
        8, "slots of a block; the newest token's is one of them", limits=Limits(2, 256, "[]")
    )
    causal: bool = option(
        True, "let a slot see only those before it, so that a draft does not depend on k"
    )
    mask_token: int | None = option(
        None,
        "id in the slots to be drafted, best one that no text holds [default: found]",
        limits=NOT_NEGATIVE,
    )
    intermediate_size: int | None = option(
        None, "width of the MLPs [default: the target's]", limits=WIDTH
    )


@dataclass(frozen=True, kw_only=True)
class DsparkOptions(DflashOptions):
    """The same with a table of transitions between drafted tokens."""

    markov_rank: int = option(64, "rank of the table", limits=WIDTH)


DrafterOptions = (
    Eagle3Options
    | PeagleOptions
    | MtpOptions
    | DraftLmOptions
    | Eagle1Options
    | MedusaOptions
    | MlpOptions
    | DflashOptions
    | DsparkOptions
)
OPTIONS: dict[str, type[DrafterOptions]] = {
    "eagle3": Eagle3Options,
    "p-eagle": PeagleOptions,
    "mtp": MtpOptions,
    "draft-lm": DraftLmOptions,
    "eagle1": Eagle1Options,
    "medusa": MedusaOptions,
    "mlp": MlpOptions,
    "dflash": DflashOptions,
    "dspark": DsparkOptions,
}


@dataclass(frozen=True, kw_only=True)
class SuffixOptions:
    """Suffix decoding, under the names and defaults that Arctic Inference and vLLM use for it."""

    max_tree_depth: int = option(24, "longest context matched", limits=AT_LEAST_1)
    max_cached_requests: int = option(
        10000,
        "finished requests that are searched, the oldest forgotten first; 0 shares nothing",
        limits=NOT_NEGATIVE,
    )
    max_cached_tokens: int = option(
        2**21, "tokens of finished requests held at most, about 70 bytes each", limits=AT_LEAST_1
    )
    max_spec_factor: float = option(
        1.0, "drafted tokens per token of matching context", limits=NOT_NEGATIVE
    )
    max_spec_offset: float = option(0.0, "drafted tokens added to that", limits=NOT_NEGATIVE)
    min_token_prob: float = option(
        0.1, "a draft ends before the chance of having come so far falls below this", limits=SHARE
    )


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Taps that engines assume, (2, L // 2, L - 3), moved into 1 .. L - 1 and without repetition
    for a target of few layers."""
    last = max(1, num_layers - 1)
    return tuple(sorted({min(max(tap, 1), last) for tap in (2, num_layers // 2, num_layers - 3)}))
