"""Options of new drafts: those that users give, and one dataclass a family. What is left out
follows the target. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, fields

from draftsmith.config import AT_LEAST_1, NOT_NEGATIVE, POSITIVE, Limits, option
from draftsmith.errors import UserError

# More are in no draft, and would fill any memory.
LAYERS, HEADS, WIDTH = (Limits(1, most, "[]") for most in (256, 1024, 2**18))


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    rank: int = option(
        16, "rank of the adapters on every linear layer of the decoder", limits=AT_LEAST_1
    )
    alpha: float = option(
        32.0, "scale of the adapters; their output is multiplied by alpha / rank", limits=POSITIVE
    )


@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """Options of all families by their names, of which each family has some: those of its class
    below. One that is not given is as that class has it."""

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
        None,
        "width of the MLPs; of an MTP module another than the target's cannot be stitched for "
        "engines [default: the target's; of a new language model 3 times its own width]",
        limits=WIDTH,
    )
    num_attention_heads: int | None = option(
        None,
        "attention heads [default: the target's; of a new language model one for 64 of its width]",
        limits=HEADS,
    )
    num_key_value_heads: int | None = option(
        None,
        "key and value heads [default: the target's; of a new language model all heads]",
        limits=HEADS,
    )
    head_dim: int | None = option(None, "width of a head [default: the target's]", limits=HEADS)
    train_head: bool | None = option(
        None,
        "train the output head; false keeps the target's, for less memory and time a step "
        "[default: true]",
    )
    norm_before_residual: bool | None = option(
        None, "start the residual stream from the normed state (vLLM only)"
    )
    fc_norm: bool | None = option(None, "norm every tap before they are joined (EAGLE-3.1)")
    norm_output: bool | None = option(None, "feed the normed state back while drafting (EAGLE-3.1)")
    window: int | None = option(
        None, "attend to the last so many positions alone [default: to all]", limits=AT_LEAST_1
    )
    num_hidden_layers: int | None = option(
        None,
        "decoder layers of P-EAGLE; those after the first are plain [default: 4]",
        limits=LAYERS,
    )
    mask_token: int | None = option(
        None,
        "id in the slots to be drafted, best one that no text holds [default: found]",
        limits=NOT_NEGATIVE,
    )
    modules: int | None = option(
        None,
        "one for each drafted token, where targets may have several (DeepSeek-V3, GLM-4.5) "
        "[default: 1]",
        limits=LAYERS,
    )
    init: str | None = option(
        None, "folder or Hub id of a causal LM to start from [default: a new one]"
    )
    target_layers: tuple[int, ...] | None = option(
        None,
        "instead: these layers of the target, with its embeddings, norm and head",
        limits=NOT_NEGATIVE,
    )
    num_layers: int | None = option(
        None,
        "layers of a block or of a new language model [default: 2]; residual blocks of a Medusa "
        "head [default: 1]",
        limits=LAYERS,
    )
    hidden_size: int | None = option(
        None, "width of a new language model [default: half the target's]", limits=WIDTH
    )
    lora: LoraOptions | None = option(
        None, "train low-rank adapters of `init` only; they are merged when the draft is saved"
    )
    num_heads: int | None = option(
        None, "Medusa's heads: tokens that can be drafted [default: 4]", limits=LAYERS
    )
    num_predict: int | None = option(
        None, "tokens that an MLP speculator can draft [default: 4]", limits=LAYERS
    )
    inner_size: int | None = option(
        None, "width of the state of an MLP speculator [default: the target's]", limits=WIDTH
    )
    block_size: int | None = option(
        None,
        "slots of a block; the newest token's is one of them [default: 8]",
        limits=Limits(2, 256, "[]"),
    )
    causal: bool | None = option(
        None,
        "let a slot see only those before it, so that a draft does not depend on k [default: true]",
    )
    markov_rank: int | None = option(
        None, "rank of DSpark's table of transitions [default: 64]", limits=WIDTH
    )


@dataclass(frozen=True, kw_only=True)
class DrafterOptions:
    """Options of a draft of one family, whose own class has them."""


@dataclass(frozen=True, kw_only=True)
class Eagle3Options(DrafterOptions):
    """One decoder layer over a few taps of the target."""

    taps: tuple[int, ...] | None = None
    draft_vocab_size: int | None = None
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    train_head: bool = True
    norm_before_residual: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    window: int | None = None


@dataclass(frozen=True, kw_only=True)
class PeagleOptions(Eagle3Options):
    """EAGLE-3 that drafts all positions in one pass."""

    num_hidden_layers: int = 4
    mask_token: int | None = None


@dataclass(frozen=True, kw_only=True)
class MtpOptions(DrafterOptions):
    """Decoder layers of the target's shape over its final state: one, applied again and again, or
    one for each drafted token."""

    intermediate_size: int | None = None
    modules: int = 1
    window: int | None = None


@dataclass(frozen=True, kw_only=True)
class Eagle1Options(DrafterOptions):
    """One decoder layer of the target's width over its final state."""

    intermediate_size: int | None = None
    window: int | None = None


@dataclass(frozen=True, kw_only=True)
class MedusaOptions(DrafterOptions):
    """Small heads on the target's final state, one a draft position."""

    num_heads: int = 4
    num_layers: int = 1


@dataclass(frozen=True, kw_only=True)
class MlpOptions(DrafterOptions):
    """A recurrent network of one layer over the target's final state and the drafted tokens, with
    tied weights."""

    num_predict: int = 4
    inner_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class DraftLmOptions(DrafterOptions):
    """A causal LM of its own: an existing one, layers of the target, or a new Llama of the given
    shape over its vocabulary."""

    init: str | None = None
    target_layers: tuple[int, ...] | None = None
    num_layers: int = 2
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    window: int | None = None
    lora: LoraOptions | None = None


@dataclass(frozen=True, kw_only=True)
class DflashOptions(DrafterOptions):
    """A few layers that draft a block in one pass."""

    taps: tuple[int, ...] | None = None
    num_layers: int = 2
    block_size: int = 8
    causal: bool = True
    mask_token: int | None = None
    intermediate_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class DsparkOptions(DflashOptions):
    """The same with a table of transitions between drafted tokens."""

    markov_rank: int = 64


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


def options_of(family: str, given: DraftOptions | None) -> DrafterOptions:
    """Options of a draft of the family. Raises `UserError` for one that the family has not."""
    cls = OPTIONS[family]
    known = [field.name for field in fields(cls)]
    every = vars(given or DraftOptions())
    values = {name: value for name, value in every.items() if value is not None}
    for name in values:
        if name not in known:
            raise UserError(
                f"option 'draft.{name}' is none of family {family!r}, which has "
                f"{', '.join(known)}; leave it out"
            )
    return cls(**values)


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Taps that engines assume, (2, L // 2, L - 3), moved into 1 .. L - 1 and without repetition
    for a target of few layers."""
    last = max(1, num_layers - 1)
    return tuple(sorted({min(max(tap, 1), last) for tap in (2, num_layers // 2, num_layers - 3)}))
