"""An MTP module whose block is a layer of the target's own class, with experts and latent attention
where those have them: the one that a target brought along, or a new one for a target of the kinds
that can (DeepSeek-V3, GLM-4.5 to 4.7, Qwen3-Next, Qwen3.5, Ernie-4.5), whose fine-tunes often lack
theirs.

The state it reads is the one that the target's head multiplies, after the final norm. It is saved
under the names it was published with.

Several of these, one for each drafted token, are DeepSeek-V3's (arXiv 2412.19437, section 2.2):

    module m (from 0) at position t reads the state of module m - 1 there (m = 0: the target's) and
    the token at t + 1 + m, and predicts the token at t + 2 + m

Each attends its own keys, so it has to read every position: in serving, positions that it read with
tokens which were then rejected, or not drafted, are read again with the next proposal. B rows, L
columns, T ragged positions, N modules.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import pad

from draftsmith.drafters.autoregressive.chain import DraftLoop
from draftsmith.drafters.autoregressive.draft_sampler import DraftSampler
from draftsmith.drafters.autoregressive.state import Unread
from draftsmith.drafters.heads.mtp_head import MtpHead
from draftsmith.drafters.heads.mtp_layouts import (
    LAYOUTS,
    SPECULATORS,
    ShippedLayout,
    layout_of,
    module_tensors,
    own_names,
    text_values,
)
from draftsmith.drafters.init_from_target import fitted_norm, gains
from draftsmith.drafters.interface import DraftInputs, UnrollBatch, UnrolledStep
from draftsmith.drafters.options import MtpOptions
from draftsmith.drafters.target.attention import register
from draftsmith.drafters.target.probe import AttentionShapes
from draftsmith.drafters.target.target import FINAL, Target
from draftsmith.drafters.unrolled.unroll import UnrollPass
from draftsmith.drafters.weights import (
    ReadBytes,
    load_into,
    read_config,
    weight_bytes,
    write_weights,
)
from draftsmith.errors import UserError
from draftsmith.kernels.attention.paged import PagedPass
from draftsmith.kernels.attention.pool import LayerShape, PagedPool
from draftsmith.kernels.products.fast_types import name_of

if TYPE_CHECKING:
    from typing_extensions import Self


EXPERT = re.compile(r"(layer\.)?mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
GATE_UP, DOWN = "layer.mlp.experts.gate_up_proj", "layer.mlp.experts.down_proj"


def stacked_experts(tensors: Mapping[str, torch.Tensor], where: str) -> dict[str, torch.Tensor]:
    """Each expert's gate and up [I, H] and down [H, I] -> [E, 2 I, H] and [E, H, I]; a dense layer
    as it is."""
    stacked = {name: tensor for name, tensor in tensors.items() if not EXPERT.fullmatch(name)}
    numbers = {int(found[2]) for name in tensors if (found := EXPERT.fullmatch(name))}
    if not numbers:
        return stacked

    def projection(number: int, kind: str) -> torch.Tensor:
        name = f"layer.mlp.experts.{number}.{kind}_proj.weight"
        if name not in tensors:
            raise UserError(
                f"weight {name!r} of the MTP module is missing in {where!r}; restore the folder"
            )
        return tensors[name]

    experts = range(max(numbers) + 1)
    halves = [
        torch.cat([projection(number, "gate"), projection(number, "up")]) for number in experts
    ]
    return {
        **stacked,
        GATE_UP: torch.stack(halves),
        DOWN: torch.stack([projection(number, "down") for number in experts]),
    }


def single_experts(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse."""
    single = {name: tensor for name, tensor in tensors.items() if name not in (GATE_UP, DOWN)}
    if GATE_UP not in tensors:
        return single
    for number, (gate_up, down) in enumerate(zip(tensors[GATE_UP], tensors[DOWN], strict=True)):
        gate, up = gate_up.chunk(2)
        for kind, tensor in (("gate", gate), ("up", up), ("down", down)):
            single[f"layer.mlp.experts.{number}.{kind}_proj.weight"] = tensor
    return single


class AppendedMtp(MtpHead):
    def __init__(self, target: Target, layout: ShippedLayout):
        config = copy.deepcopy(target.config)
        config._attn_implementation = register()
        config.moe_layer_start_index = target.num_layers  # Ernie's block has no experts
        index = last_attention(target)
        last = target.layers[index]
        layer: Callable[..., torch.nn.Module] = type(last)
        norm: Callable[..., torch.nn.Module] = type(last.input_layernorm)
        super().__init__(
            config,
            target,
            tap=FINAL,
            norm=partial(norm, config.hidden_size, eps=config.rms_norm_eps),
            # One more of the last layer's kind: the first ones have no experts.
            layer=partial(layer, config, layer_idx=index),
            rotary=copy.deepcopy(rotary_of(target)),  # it moves with the module
            feeds_normed=layout.feeds_normed,
            masks_first=layout.masks_first,
            last_norm=layout.last_norm,
        )
        self.layout = layout
        self.layer.self_attn.layer_idx = 0  # of a pool of its own

    @classmethod
    def new(
        cls, options: MtpOptions, target: Target, token_counts: torch.Tensor | None
    ) -> AppendedMtp:
        """A new module, for a target of one of the `LAYOUTS`."""
        kind = target.config.model_type
        if options.intermediate_size is not None:
            raise UserError(
                f"option 'draft.intermediate_size' is {options.intermediate_size}, but the module "
                f"of a {kind!r} target has a block of the target's own shape; leave it out"
            )
        drafter = cls(target, LAYOUTS[kind]).to(target.device)
        draw_stacked(drafter.layer)
        # As in `LlamaMtp.new`; some classes store the gains less 1.
        if drafter.layout.last_norm:
            norm = drafter.norm
            less = gains(norm, target.hidden_size).to(norm.weight) - norm.weight
            norm.weight.data.copy_(fitted_norm(target).to(norm.weight) - less)
        return drafter

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """The router's biases stay float32 wherever the module goes, as in the target: rounded,
        they choose other experts."""
        before = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, buffer in self.named_buffers():
            if buffer.dtype != before[name].dtype:
                buffer.data = before[name].to(buffer.device)
        return self

    @torch.no_grad()
    def cache_shapes(self) -> list[LayerShape]:
        """Shape of the keys and values that the layer hands to its attention, found by running it:
        every kind of attention has other config keys for it."""
        weight = self.eh_proj.weight
        state = torch.zeros(1, 1, weight.shape[0], device=weight.device, dtype=weight.dtype)
        attention = AttentionShapes()
        self.step(
            state, state, torch.zeros(1, 1, dtype=torch.int64, device=weight.device), attention
        )
        (shape,) = attention.shapes.values()
        return [shape]

    def save(self, folder: Path) -> None:
        config = self.config_values(1)
        write_weights(folder, config, self.published(config, 0))

    def config_values(self, num_modules: int) -> dict[str, Any]:
        """The config of a folder with so many modules."""
        values: dict[str, Any] = json.loads(self.config.to_json_string(use_diff=False))
        values |= {self.layout.counted_by: num_modules, "dtype": name_of(self.dtype)}
        if self.layout is SPECULATORS:
            values["speculators_model_type"] = "mtp"
        return values

    def published(self, config: Mapping[str, Any], index: int) -> dict[str, torch.Tensor]:
        """The tensors of module `index` by their published names."""
        prefix = self.layout.prefix_for(config, index)
        tensors = single_experts(self.state_dict())
        return {prefix + self.layout.published_name(name): one for name, one in tensors.items()}

    @classmethod
    def load(cls, folder: Path, target: Target, index: int = 0) -> AppendedMtp:
        """Module `index` of the folder."""
        config = read_config(folder)
        values, layout = text_values(config), layout_of(config)
        assert layout is not None
        for key, own in (
            ("model_type", target.config.model_type),
            ("num_hidden_layers", target.num_layers),
        ):
            if values.get(key) != own:
                raise UserError(
                    f"the MTP module in {str(folder)!r} is for a target with "
                    f"{key}={values.get(key)!r} and {target.name!r} has "
                    f"{own!r}; use another draft"
                )
        prefix = layout.prefix_for(values, index)
        published = module_tensors(folder, values, prefix, needed=layout.needed)
        tensors = stacked_experts(own_names(published, layout), str(folder))
        with torch.device("meta"):  # its experts may be many: the weights are made once
            drafter = cls(target, layout)
        drafter.to(tensors["eh_proj.weight"].dtype).to_empty(device="cpu")
        load_into(drafter, tensors, str(folder))
        return drafter


@torch.no_grad()
def draw_stacked(layer: torch.nn.Module) -> None:
    """Draws the weights that modules of transformers leave as memory had them, experts and routers,
    as `nn.Linear` draws its own."""
    for module in layer.modules():
        if not hasattr(module, "reset_parameters"):
            for parameter in module.parameters(recurse=False):
                if parameter.ndim > 1:
                    bound = parameter.shape[-1] ** -0.5
                    parameter.uniform_(-bound, bound)


def last_attention(target: Target) -> int:
    """The last layer with attention over the whole text; layers of other kinds have states."""
    kinds = getattr(target.config, "layer_types", None) or ["full_attention"] * target.num_layers
    whole = [index for index, kind in enumerate(kinds) if kind == "full_attention"]
    return whole[-1] if whole else target.num_layers - 1


def rotary_of(target: Target) -> torch.nn.Module:
    """The model's rotary embedding, wherever a multimodal one has its language model."""
    return next(
        module
        for name, module in target.model.named_modules()
        if name.endswith("rotary_emb") and "visual" not in name
    )


class DeepMtp(nn.Module, DraftLoop):
    family = "mtp"
    vocab_map = None

    def __init__(self, heads: Sequence[AppendedMtp]):
        super().__init__()
        for index, head in enumerate(heads):
            head.layer.self_attn.layer_idx = index  # of the pool
        self.heads: Sequence[AppendedMtp] = nn.ModuleList(heads)
        self.taps, self.config, self.max_depth = heads[0].taps, heads[0].config, len(heads)
        self.vocab_size = self.config.vocab_size

    @classmethod
    def create(cls, options: MtpOptions, target: Target, *, seed: int) -> DeepMtp:
        seeds = range(seed, seed + options.modules)
        return cls([AppendedMtp.create(options, target, seed=one) for one in seeds])

    @classmethod
    def load(cls, folder: Path, target: Target, num_modules: int) -> DeepMtp:
        return cls([AppendedMtp.load(folder, target, index) for index in range(num_modules)])

    def save(self, folder: Path) -> None:
        config = self.heads[0].config_values(self.max_depth)
        named: dict[str, torch.Tensor] = {}
        for index, head in enumerate(self.heads):
            named |= head.published(config, index)
        write_weights(folder, config, named)

    @property
    def max_positions(self) -> int:
        return self.heads[0].max_positions

    def head_weight(self) -> torch.Tensor:
        return self.heads[0].head_weight()

    def read_bytes(self) -> ReadBytes:
        """All modules read every position, however few tokens are drafted."""
        table = weight_bytes([], self.head_weight())
        return ReadBytes(proposal=weight_bytes([self]), token=table)

    def new_pool(
        self, num_blocks: int, block_size: int, device: torch.device, dtype: torch.dtype
    ) -> PagedPool:
        shapes = [shape for head in self.heads for shape in head.cache_shapes()]
        return PagedPool.of_layers(shapes, num_blocks, block_size, device, dtype)

    def cached_after(self, last: int, drafted: int, accepted: int) -> int:
        """The last module reads `max_depth` tokens ahead of its position, and later ones than the
        newest were drafted."""
        return last - min(last, self.max_depth - 1)

    def unroll(self, batch: UnrollBatch) -> Iterator[UnrolledStep]:
        hidden = self.heads[0].fuse(batch.taps)
        positions, has_next = batch.positions, batch.has_next
        for depth in range(batch.num_steps):
            if depth >= self.max_depth:
                # Nothing is drafted so deep.
                nothing = torch.zeros_like(hidden)
                yield UnrolledStep(hidden=nothing, valid=torch.zeros_like(has_next), offset=2)
                continue
            head = self.heads[depth]
            # the last columns get wrong ones, and nothing to predict
            embeds = head.embed(torch.roll(batch.input_ids, -1 - depth, dims=1))
            context = UnrollPass(batch.segments)
            step = head.step(embeds, hidden, positions, context)
            hidden = step.next_hidden
            drafted = pad(step.head_input[:, : hidden.shape[1] - depth], (0, 0, depth, 0))
            yield UnrolledStep(hidden=drafted, valid=has_next & (positions >= depth), offset=2)

    def draft(self, inputs: DraftInputs, sampler: DraftSampler) -> None:
        """Every module reads all positions of the rows that have a state, also where none drafts so
        deep."""
        unread = Unread.of(inputs, AppendedMtp.ahead)
        if not unread.rows:
            return
        plan = sampler.plan(unread.rows, self.max_depth)
        (positions, following, rows, counts, ends, *places), depths = plan.sent(
            inputs.tokens.device,
            unread.spread(unread.starts),
            unread.spread(unread.begins),
            unread.rows,
            unread.counts,
            [end - 1 for end in itertools.accumulate(unread.counts)],
            # where the rows of each depth are among all
            *([unread.rows.index(row) for row in alive] for alive in plan.alive),
        )
        tokens = inputs.tokens[following]
        tables = inputs.block_tables[rows]
        context = PagedPass(inputs.own_pool, tables, positions, counts)
        hidden = self.heads[0].fuse(inputs.taps)
        for depth, head in enumerate(self.heads):
            step = head.step(head.embed(tokens)[None], hidden[None], positions[None], context)
            hidden = step.next_hidden[0]
            newest = tokens[ends]
            if depth < len(depths):
                at = places[depth]
                states = step.head_input[0][ends[at]]
                logits = states @ head.head_weight().T
                newest = newest.clone()
                newest[at] = sampler.draw(
                    depths[depth].rows, depth, logits, positions[ends[at]] + 2 + depth
                )
            tokens = torch.roll(tokens, -1)
            tokens[ends] = newest  # of a row that drafts no more, whatever is there is read again
