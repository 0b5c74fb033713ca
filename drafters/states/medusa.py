"""Medusa (arXiv 2401.10774): a few small heads on the target's final state, each drafting its own
position ahead.

    logits of x_{t+2+s} = head(blocks_s(h_t)),   a block: x -> x + silu(linear(x))

Drafts do not see each other, so q of a chain is a product. The head is the target's own, frozen and
not part of the module, so training touches only the blocks; drafts made elsewhere may have a table
for every head, which is trained with its blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from draftsmith.drafters.autoregressive.state import HeadStep
from draftsmith.drafters.draft_shape import check_fits
from draftsmith.drafters.interface import DraftInputs, Proposal
from draftsmith.drafters.layouts.folder import DraftFolder
from draftsmith.drafters.options import MedusaOptions
from draftsmith.drafters.states.state_head import StateHead, newest_columns
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.tree_shape import FixedTree, TreeShape
from draftsmith.drafters.trees.candidates import FixedLevels, TreeDistributions, choose_fixed
from draftsmith.drafters.trees.nodes import no_trees
from draftsmith.drafters.weights import ReadBytes, read_config, read_weights, weight_bytes
from draftsmith.errors import UserError
from draftsmith.kernels.dispatch import sent
from draftsmith.kernels.products.fast_types import name_of

# How the original trainer names all heads together.
PREFIXES = ("medusa_heads.", "medusa_head.")


class ResBlock(nn.Module):
    def __init__(self, size: int, *, bias: bool):
        super().__init__()
        self.linear = nn.Linear(size, size, bias=bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + nn.functional.silu(self.linear(hidden))


class Medusa(StateHead):
    family = "medusa"
    shapes = (FixedTree,)

    def __init__(
        self,
        target: Target,
        *,
        num_heads: int,
        num_layers: int,
        bias: bool = True,
        own_tables: bool = False,
    ):
        super().__init__()
        size = target.hidden_size
        self.vocab_size, self.max_depth, self.num_layers, self.bias = (
            target.vocab_size,
            num_heads,
            num_layers,
            bias,
        )
        self._target = target
        self.heads = nn.ModuleList(
            nn.Sequential(*[ResBlock(size, bias=bias) for _ in range(num_layers)])
            for _ in range(num_heads)
        )
        tables = (
            [nn.Linear(size, target.vocab_size, bias=False) for _ in range(num_heads)]
            if own_tables
            else []
        )
        self.tables = nn.ModuleList(tables)
        self.to(target.device)

    @classmethod
    def matches(cls, draft: DraftFolder, target: Target | None = None) -> bool:
        return (
            "medusa_num_heads" in draft.config  # the original layout names nothing else
            or draft.config.get("model_type") == "medusa"
        )

    @classmethod
    def new(
        cls, options: MedusaOptions, target: Target, token_counts: torch.Tensor | None
    ) -> Medusa:
        """Blocks of zeros draft what the target itself says next."""
        drafter = cls(target, num_heads=options.num_heads, num_layers=options.num_layers)
        for name, parameter in drafter.named_parameters():
            # The first block of a head starts as the identity; further ones need noise to differ
            # from it at all.
            parameter.data.mul_(0.0 if name.endswith("bias") or ".0.linear" in name else 0.1)
        return drafter

    def begin(self, taps: torch.Tensor) -> torch.Tensor:
        return taps.to(self.dtype)

    def advance(self, state: torch.Tensor, tokens: torch.Tensor, depth: int) -> HeadStep:
        return HeadStep(next_hidden=state, head_input=self.heads[depth](state))

    def head_at(self, depth: int) -> torch.Tensor:
        return self.tables[depth].weight if len(self.tables) else self.head_weight()

    @property
    def has_own_heads(self) -> bool:
        return len(self.tables) > 0

    def head_weight(self) -> torch.Tensor:
        if self.has_own_heads:
            return self.tables[0].weight
        return self._target.output_weight.to(self.dtype)

    @torch.no_grad()
    def propose_tree(self, inputs: DraftInputs, shape: TreeShape) -> Proposal:
        """Propose a `FixedTree`; heads do not see each other's drafts, so all of it takes one
        pass."""
        assert isinstance(shape, FixedTree)
        rows = ((inputs.lengths > 1) & (inputs.num_draft > 0)).nonzero()[:, 0]
        if len(rows) == 0 or inputs.taps is None:
            return no_trees(inputs)
        levels = FixedLevels.of(shape, self.max_depth, apart=inputs.adjust is not None)
        budgets, columns = inputs.num_draft[rows], newest_columns(inputs, rows)
        parts = sent(inputs.tokens.device, *columns, rows, budgets, *levels.columns())
        tokens, state, _ = self.newest(inputs, inputs.taps, parts[:3])

        def logits_at(depth: int) -> torch.Tensor:
            return self.advance(state, tokens, depth).head_input @ self.head_at(depth).T

        distributions = TreeDistributions(
            inputs, parts[3], vocab_size=self.vocab_size, vocab_map=None
        )
        most = min(int(budgets.max()), levels.num_nodes)
        return choose_fixed(distributions, logits_at, levels.on_device(parts[5:]), parts[4], most)

    def read_bytes(self) -> ReadBytes:
        """Heads wait for nothing, so a table that they share is read once."""
        shared = [] if len(self.tables) else [self.head_weight()]
        return ReadBytes(
            proposal=weight_bytes([], *shared), token=weight_bytes([self]) // self.max_depth
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.heads[0][0].linear.weight.dtype

    def portable_tensors(self) -> dict[str, torch.Tensor]:
        return {engine_name(name): value for name, value in self.state_dict().items()}

    def portable_config(self) -> dict[str, Any]:
        """Config as vLLM read it while it served Medusa. `original_lm_head`: the heads share the
        target's."""
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": self._target.hidden_size,
            "vocab_size": self.vocab_size,
            "truncated_vocab_size": self.vocab_size,
            "num_heads": self.max_depth,
            "num_hidden_layers": self.num_layers,
            "medusa_fc_bias": self.bias,
            "original_lm_head": not len(self.tables),
            "dtype": name_of(self.dtype),
        }

    @classmethod
    def load(cls, folder: Path, target: Target) -> Medusa:
        """Ours, vLLM's, or the original layout with `medusa_lm_head.safetensors` or `.pt`."""
        values = read_config(folder)
        tensors = {own_name(name): tensor for name, tensor in read_weights(folder).items()}
        check_shape(values, target, folder)
        num_heads, num_layers = numbers_of(values, tensors.keys(), folder)
        if (shared := tensors.pop("lm_head.weight", None)) is not None:
            tensors |= shared_table(shared, target, num_heads)
        own_tables = "tables.0.weight" in tensors
        drafter = cls(
            target,
            num_heads=num_heads,
            num_layers=num_layers,
            bias="heads.0.0.linear.bias" in tensors,
            own_tables=own_tables,
        )
        return drafter.filled(tensors, folder)


def engine_name(name: str) -> str:
    """Ours -> vLLM's: heads.i.j.linear.weight -> blocks.i.layers.j.weight."""
    parts = name.split(".")
    if parts[0] == "tables":
        return name.replace("tables", "lm_heads")
    return f"blocks.{parts[1]}.layers.{parts[2]}.{parts[4]}"


def own_name(name: str) -> str:
    """vLLM's or the original's (i.j.linear.weight, i.j.weight for the table behind the layers) ->
    ours; others stay and are refused."""
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    parts = name.split(".")
    if parts[0] == "blocks" and len(parts) == 5:
        return f"heads.{parts[1]}.{parts[3]}.linear.{parts[4]}"
    if parts[0] == "lm_heads":
        return name.replace("lm_heads", "tables")
    if parts[0].isdigit() and len(parts) == 4:
        return f"heads.{name}"
    if parts[0].isdigit() and len(parts) == 3:
        return f"tables.{parts[0]}.weight"
    return name


def shared_table(table: torch.Tensor, target: Target, num_heads: int) -> dict[str, torch.Tensor]:
    """A table for all heads: nothing to keep when it is the target's, one of each head's own
    otherwise."""
    own = target.output_weight.to(table)
    if table.shape == own.shape and torch.allclose(table.to(own.device), own, rtol=1e-2, atol=1e-4):
        return {}
    return {f"tables.{head}.weight": table for head in range(num_heads)}


def numbers_of(values: Mapping[str, Any], names: Iterable[str], folder: Path) -> tuple[int, int]:
    """(heads, layers of each), counted in the tensors: the configs of the first drafts say 2 heads
    where there are 5. vLLM's config counts for itself."""
    parts = [name.split(".") for name in names if name.startswith("heads.")]
    found = tuple(1 + max((int(part[at]) for part in parts), default=-1) for at in (1, 2))
    if 0 in found or values.get("num_heads", found[0]) != found[0]:
        raise UserError(
            f"draft {str(folder)!r} has {found[0]} heads and layers of {found[1]} in its weights, "
            f"and num_heads={values.get('num_heads')!r} in its config; restore the folder"
        )
    return found[0], found[1]


def check_shape(values: Mapping[str, Any], target: Target, folder: Path) -> None:
    """Shapes of the original layout, which leaves them out, from its tensors."""
    expected = {
        "vocab_size": target.vocab_size,
        "truncated_vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
    }
    check_fits({**expected, **values}, expected, target, folder)
