"""DFlash (arXiv 2602.06036): a few layers draft a whole block in one pass over keys and values made
from the target's states.

    context at t  = hidden_norm(fc(cat(taps of t))); every layer's key and value projections read
    it, nothing else does
    block         = the newest token x_n, then mask tokens at n + 1, n + 2, ...
    logits of x_{n+i} = target's head(norm(state of the mask at n + i))

Drafts do not see each other, so q of a chain is a product. In a causal block a draft does not
depend on how many follow it, which a server that changes k needs; blocks that see all of
themselves are served as in vLLM, k + 1 slots long. To draft, keys and values of the context are
written, a block is read in one pass, and its drafts are drawn depth by depth; as it is, and as a
graph holds it.

Legend: R rows that draft, S slots of a block, T tokens of a pass, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from draftsmith.drafters.autoregressive.call_graphs import CallLoop
from draftsmith.drafters.autoregressive.draft_sampler import DraftSampler, DraftStep
from draftsmith.drafters.autoregressive.padded_round import PaddedRound, RoundShape
from draftsmith.drafters.blocks.block_unroll import BlockPass
from draftsmith.drafters.blocks.shape import (
    BlockShape,
    block_values,
    check_block,
    read_tables,
    shape_in,
)
from draftsmith.drafters.draft_shape import config_dict, layer_config, shape_of, windows_config
from draftsmith.drafters.init_from_target import (
    LayeredDraft,
    OwnTables,
    adopt_layers,
    average_taps,
    checked_mask_token,
    fitted_norm,
)
from draftsmith.drafters.interface import DraftInputs, UnrollBatch, UnrolledStep
from draftsmith.drafters.layouts.folder import DraftFolder
from draftsmith.drafters.options import DflashOptions, default_taps
from draftsmith.drafters.target.attention import AttentionContext
from draftsmith.drafters.target.taps import check_draft_taps, check_taps
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.weights import ReadBytes, read_config, read_weights, weight_bytes
from draftsmith.errors import UserError
from draftsmith.kernels.attention.paged import PagedPass
from draftsmith.kernels.attention.pool import PagedPool, PassLayout, Scoring, TreeLayout
from draftsmith.kernels.constants import NULL_BLOCK
from draftsmith.kernels.dispatch import reads_freely
from draftsmith.kernels.products.fast_types import name_of


class Dflash(LayeredDraft, CallLoop):
    family = "dflash"
    architecture = "DFlashDraftModel"
    other_architectures: tuple[str, ...] = ()
    from_anchor = False  # whether the first draft is read off the newest token's own slot
    max_depth: int

    def __init__(
        self,
        config: Qwen3Config,
        target: Target,
        taps: tuple[int, ...],
        shape: BlockShape,
        tables: OwnTables | None = None,
    ):
        super().__init__()
        if config.hidden_size != target.hidden_size or config.vocab_size != target.vocab_size:
            raise UserError(
                f"the {self.family} draft has hidden_size={config.hidden_size}, "
                f"vocab_size={config.vocab_size} where "
                f"{target.hidden_size} and {target.vocab_size} are needed for {target.name!r}; "
                "use another draft"
            )
        self.config, self.taps, self.shape = config, taps, shape
        self.vocab_size = config.vocab_size
        self.max_depth = shape.block_size - (0 if self.from_anchor else 1)
        self._target = target
        self._rotary = (Qwen3RotaryEmbedding(config),)
        self.fc = nn.Linear(len(taps) * target.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(
            Qwen3DecoderLayer(config, index) for index in range(config.num_hidden_layers)
        )
        for index, layer in enumerate(self.layers):
            layer.self_attn.sliding_window = shape.window(index)
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        (tables or OwnTables()).add_to(self, config)
        self.to(target.device)

    @classmethod
    def matches(cls, draft: DraftFolder, target: Target | None = None) -> bool:
        shared = draft.architecture == Dflash.architecture
        is_named = draft.architecture in (cls.architecture, *cls.other_architectures)
        return draft.kind == cls.family if shared and draft.kind else is_named

    @classmethod
    def new(
        cls, options: DflashOptions, target: Target, token_counts: torch.Tensor | None
    ) -> Dflash:
        taps = options.taps or default_taps(target.num_layers)
        check_draft_taps(taps, target.num_layers)
        shape = shape_of(target, options) | {"num_hidden_layers": options.num_layers}
        config = layer_config(Qwen3Config, shape)
        drafter = cls(config, target, taps, cls.shape_from(options, target))
        # The head is frozen, so the last norm must fit it.
        drafter.norm.weight.data.copy_(fitted_norm(target))
        average_taps(drafter.fc)
        adopt_layers(target, drafter.layers)
        # What the keys and values of the last layer are made of has the target's norm before it,
        # too.
        drafter.hidden_norm.weight.data.copy_(drafter.layers[-1].input_layernorm.weight)
        return drafter

    @classmethod
    def shape_from(cls, options: DflashOptions, target: Target) -> BlockShape:
        return BlockShape(
            options.block_size, checked_mask_token(target, options.mask_token), options.causal
        )

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Slots [b, t] -> [b, t, H]."""
        embeds = super().embed(ids)
        if self.mask_embedding is None:
            return embeds
        return torch.where((ids == self.shape.mask_token)[..., None], self.mask_embedding, embeds)

    def head_input(self, states: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Normed states [..., H] and the token before each draft [...] -> what the head
        multiplies."""
        return states

    def confidence(self, head_input: torch.Tensor) -> torch.Tensor | None:
        """Head inputs -> logits [...] of the chance that the token drafted from each is accepted;
        None without a confidence head."""
        return None

    def context(self, taps: torch.Tensor) -> torch.Tensor:
        return self.hidden_norm(self.fc(taps.to(self.dtype)))

    def context_keys(
        self, context: torch.Tensor, positions: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values [b, kv_heads, t, D] of every layer, of context states [b, t, H] at
        `positions` [b or 1, t]."""
        rotary = self._rotary[0](context, positions)
        for layer in self.layers:
            yield projected(layer.self_attn, context, rotary)

    def body(
        self, ids: torch.Tensor, positions: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        """Slots [b, t] at positions [b or 1, t] -> normed states [b, t, H]."""
        states = self.embed(ids)
        rotary = self._rotary[0](states, positions)
        for layer in self.layers:
            states = layer(states, position_embeddings=rotary, attention_context=context)
        return self.norm(states)

    def unroll(self, batch: UnrollBatch) -> Iterator[UnrolledStep]:
        """One pass: the block at every column n drafts n + 1, n + 2, ... after it."""
        ids, (rows, length) = batch.input_ids, batch.input_ids.shape
        depths = min(batch.num_steps, self.max_depth)
        skipped = 0 if self.from_anchor else 1
        slots, device = depths + skipped, ids.device
        places, has_next = batch.positions, batch.has_next  # column t reads the token at t + 1
        context = list(self.context_keys(self.context(batch.taps), places))
        # Blocks before this column draft nothing that counts.
        first = max(0, batch.first - depths)
        blocks = torch.full((rows, length - first, slots), self.shape.mask_token, device=device)
        blocks[:, :, 0] = ids[:, first:]
        positions = (places[:, first:, None] + torch.arange(slots, device=device)).flatten(1)
        attention = BlockPass(
            context, slots=slots, causal=self.shape.is_causal, segments=batch.segments, first=first
        )
        states = self.body(blocks.flatten(1), positions, attention).unflatten(1, (-1, slots))
        previous = torch.roll(ids, -1, dims=1)
        for depth in range(batch.num_steps):
            if depth < depths:
                # The block that drafts the token at t + 2 at this depth stands at t + 1 - depth.
                hidden = nn.functional.pad(states[:, :, depth + skipped], (0, 0, first + depth, 1))[
                    :, 1 : length + 1
                ]
                valid = has_next & (places >= depth)
            else:
                hidden, valid = (
                    states.new_zeros(rows, length, states.shape[-1]),
                    torch.zeros_like(has_next),
                )
            head_input = self.head_input(hidden, previous)
            yield UnrolledStep(
                hidden=head_input, valid=valid, offset=2, confidence=self.confidence(head_input)
            )

    def draft_call(self, inputs: DraftInputs, sampler: DraftSampler) -> None:
        # A block without any context was never trained.
        rows = ((inputs.num_draft > 0) & (inputs.starts + inputs.lengths > 1)).nonzero()[:, 0]
        context, blocks = context_columns(inputs), self._block_columns(inputs, rows)
        plan = sampler.plan(rows.tolist(), self.max_depth)
        parts, depths = plan.sent(inputs.tokens.device, *context, *blocks)
        self._read_context(inputs, *parts[: len(context)])
        if len(rows) == 0:
            return
        states, begins, newest, tokens = self._read_blocks(inputs, parts[len(context) :])
        head, skipped = self.head_weight().T, 0 if self.from_anchor else 1
        # the chance that all drafts of a row are kept, as guessed
        survival = torch.ones_like(tokens, dtype=torch.float32)
        offered = torch.zeros_like(sampler.lengths)
        for depth, (chosen, kept, _) in enumerate(depths):
            if kept is not None:
                begins, newest, tokens, survival = (
                    begins[kept],
                    newest[kept],
                    tokens[kept],
                    survival[kept],
                )
            head_input = self.head_input(states[begins + depth + skipped], tokens)
            confidence = self.confidence(head_input) if inputs.least_survival > 0 else None
            if confidence is not None:
                # Before the draft is drawn: whether it is offered must not depend on what it is
                # (invariant 4).
                survival = survival * torch.sigmoid(confidence.float())
                sure = survival >= inputs.least_survival
                if reads_freely(sure.device) and not sure.any():
                    break
                offered[chosen] += sure
            else:
                offered[chosen] += 1
            tokens = sampler.draw(chosen, depth, head_input @ head, newest + 1 + depth)
        if inputs.least_survival > 0:
            sampler.shorten(offered)

    def cached_after(self, last: int, drafted: int, accepted: int) -> int:
        """The block's own keys stand where the context's come next."""
        return last

    def _read_context(
        self, inputs: DraftInputs, rows: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Writes keys and values of the positions [T] of `rows` [T] whose true states are new."""
        if len(rows) > 0:
            slots = inputs.own_pool.slots_of(inputs.block_tables, rows, positions)
            self._write_context(inputs.own_pool, slots, self.context(inputs.taps), positions)

    def _write_context(
        self, pool: PagedPool, slots: torch.Tensor, context: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Keys and values of context states [T, H] go to `slots` [T]."""
        pairs = self.context_keys(context[None], positions[None])
        for (keys, values), pool_keys, pool_values in zip(
            pairs, pool.keys, pool.values, strict=True
        ):
            pool_keys.index_copy_(0, slots, keys[0].transpose(0, 1).to(pool_keys.dtype))
            pool_values.index_copy_(0, slots, values[0].transpose(0, 1).to(pool_values.dtype))

    def _block_columns(self, inputs: DraftInputs, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Numbers for the device of the blocks of `rows` [R], which go from the newest token on."""
        newest = (inputs.starts + inputs.lengths - 1)[rows]
        counts = inputs.num_draft[rows].clamp(max=self.max_depth) + (0 if self.from_anchor else 1)
        begins = counts.cumsum(0) - counts
        which = torch.repeat_interleave(counts)
        slot = torch.arange(len(which)) - begins[which]
        ends = inputs.lengths.cumsum(0)[rows] - 1
        places = (newest[which] + slot, newest[which], counts[which])
        return (rows, begins, newest, counts, *places, ends)

    def _read_blocks(
        self, inputs: DraftInputs, parts: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """(normed states [T, H], each row's first slot, the position of its newest token and that
        token [R]); `parts` are the `_block_columns`, on the device."""
        rows, begins, newest, counts, positions, first, size, ends = parts
        tokens = inputs.tokens[ends]
        ids = torch.full_like(positions, self.shape.mask_token).index_copy_(0, begins, tokens)
        layout = PassLayout(
            inputs.block_tables[rows],
            positions,
            counts,
            TreeLayout(kv_indices=positions, ancestors=(1 << size) - 1, first=first),
        )
        return self._read_slots(inputs.own_pool, ids, layout), begins, newest, tokens

    def _read_slots(self, pool: PagedPool, ids: torch.Tensor, layout: PassLayout) -> torch.Tensor:
        """Slots [T] of blocks -> normed states [T, H]. A causal block is a chain; in another every
        slot sees all of its block, as the tree of `layout` says."""
        context = LayerPasses(
            self.shape.is_causal,
            lambda causal: PagedPass(
                pool,
                layout.block_tables,
                layout.positions,
                layout.lengths,
                tree=None if causal else layout.tree,
            ),
        )
        return self.body(ids[None], layout.positions[None], context)[0]

    def draft_padded(
        self, padded: PaddedRound, shape: RoundShape, pool: PagedPool | None
    ) -> list[DraftStep]:
        slots = padded.slots(shape.width)
        positions, taps = (padded.starts[:, None] + slots).flatten(), padded.taps(slots)
        assert taps is not None and pool is not None
        rows = torch.arange(len(slots), device=slots.device)
        owners = rows[:, None].expand_as(slots).flatten()
        places = pool.slots_of(padded.tables, owners, positions)
        self._write_context(pool, places, self.context(taps.flatten(0, 1)), positions)
        newest, tokens = padded.starts + padded.last + 1, padded.tokens(padded.last[:, None])[:, 0]
        states = self._padded_blocks(padded, shape, pool, tokens)
        head, skipped = self.head_weight().T, 0 if self.from_anchor else 1
        drawn: list[DraftStep] = []
        for depth in range(shape.depths):
            head_input = self.head_input(states[:, depth + skipped], tokens)
            drawn.append(padded.draw(head_input @ head, newest + 1 + depth, self.vocab_map))
            tokens = drawn[-1].tokens
        return drawn

    def _padded_blocks(
        self, padded: PaddedRound, shape: RoundShape, pool: PagedPool, tokens: torch.Tensor
    ) -> torch.Tensor:
        """States [R, S, H] of the blocks from the newest `tokens` [R] on. The last slot of a row
        that drafts less stands for the others, too."""
        skipped = 0 if self.from_anchor else 1
        sizes = padded.budgets.clamp(max=shape.depths) + skipped
        width, newest = shape.depths + skipped, padded.starts + padded.last + 1
        index = torch.arange(width, device=sizes.device).minimum((sizes - 1).clamp(min=0)[:, None])
        ids = torch.where(index == 0, tokens[:, None], self.shape.mask_token).flatten()
        positions = (newest[:, None] + index).flatten()
        # A row that drafts nothing has no place for a block.
        tables = torch.where((padded.budgets > 0)[:, None], padded.tables, NULL_BLOCK)
        seen, first = (
            one[:, None].expand_as(index).flatten()
            for one in ((1 << sizes.clamp(min=1)) - 1, newest)
        )
        tree = TreeLayout(kv_indices=positions, ancestors=seen, first=first)
        layout = PassLayout(tables, positions, torch.full_like(sizes, width), tree)
        return self._read_slots(pool, ids, layout).unflatten(0, (-1, width))

    def read_bytes(self) -> ReadBytes:
        shared = [self._target.output_weight] if self.lm_head is None else []
        return ReadBytes(proposal=weight_bytes([self], *shared), token=0)

    def portable_config(self) -> dict[str, Any]:
        """Config that vLLM and SGLang read: tapped layers are counted by their outputs."""
        block = {
            "mask_token_id": self.shape.mask_token,
            "target_layer_ids": [tap - 1 for tap in self.taps],
            "num_target_layers": self._target.num_layers,
            "sample_from_anchor": self.from_anchor,
        }
        if not self.shape.windows or self.shape.causal == self.shape.causal_windows:
            block["causal"] = self.shape.causal  # of all layers; else their kinds say it
        return {
            "architectures": [self.architecture],
            "model_type": "qwen3",
            **config_dict(self.config),
            "dtype": name_of(self.dtype),
            "tie_word_embeddings": False,
            "target_hidden_size": self._target.hidden_size,
            "num_target_layers": self._target.num_layers,
            "block_size": self.shape.block_size,
            "dflash_config": block,
            # Engines then decide on causality by `is_causal`, or by the kinds of the layers.
            **windows_config(self.shape.windows),
            **({} if self.lm_head is None else {"draft_vocab_size": self.lm_head.out_features}),
        }

    @classmethod
    def load(cls, folder: Path, target: Target) -> Dflash:
        values = block_values(read_config(folder))
        tensors = read_tables(folder, values, read_weights(folder))
        check_block(values, folder, from_anchor=cls.from_anchor)
        taps = tuple(layer + 1 for layer in values["target_layer_ids"])
        check_taps(taps, target.num_layers)
        drafter = cls(
            layer_config(Qwen3Config, values), target, taps, shape_in(values), OwnTables.of(tensors)
        )
        return drafter.filled(tensors, folder)


def projected(
    attention: Qwen3Attention, states: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [b, kv_heads, t, D] as the layer makes them of its own input."""
    heads = (*states.shape[:-1], -1, attention.head_dim)
    keys = attention.k_norm(attention.k_proj(states).view(heads)).transpose(1, 2)
    _, keys = apply_rotary_pos_emb(keys, keys, *rotary)
    return keys, attention.v_proj(states).view(heads).transpose(1, 2)


def context_columns(inputs: DraftInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """(row [T], position [T]) of the true states that are new, on the host."""
    counts = inputs.lengths - 1
    rows = torch.repeat_interleave(counts)
    offsets = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows]
    return rows, inputs.starts[rows] + offsets


class LayerPasses:
    """An `AttentionContext`: of each layer, the pass that is causal or not as `is_causal` says."""

    def __init__(self, is_causal: Callable[[int], bool], make: Callable[[bool], AttentionContext]):
        self.is_causal, self.make = is_causal, make
        self.passes: dict[bool, AttentionContext] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Scoring
    ) -> torch.Tensor:
        causal = self.is_causal(layer)
        if causal not in self.passes:
            self.passes[causal] = self.make(causal)
        return self.passes[causal].attend(layer, query, key, value, rule)
