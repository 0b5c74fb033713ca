"""Gain of draft trees by shape: tau as `draftsmith eval --tree --store` measured it, costs of a
round run here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from draftsmith.drafters.interface import GrowsTrees, check_grows
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.tree_shape import TreeShape, parse_tree
from draftsmith.drafters.trees.layout import TreeSpan, tree_pass
from draftsmith.kernels.attention.paged import PagedPass
from draftsmith.kernels.sampling.filters import SamplingRows, process
from draftsmith.kernels.verify.draft_tree import DraftTree
from draftsmith.kernels.verify.tree import verify_tree
from draftsmith.train.plan.forecast import Forecast, Spread, forecast
from draftsmith.train.plan.timing import NEW_TOKENS, Tables, round_cost, take_turns


class TreeForecast(NamedTuple):
    tree: str
    gain: Forecast  # its k counts nodes
    tokens_per_s: float  # of all rows


def forecast_tree(
    target: Target,
    drafter: Any,
    tree: str,
    tau: Spread,
    *,
    rows: int,
    context: int,
    temperature: float,
) -> TreeForecast:
    """Raises `UserError` for a shape that the drafter does not grow."""
    shape = parse_tree(tree)
    check_grows(drafter, shape)
    table = Tables(target, drafter, rows, context, shape.nodes)
    draft, verify = tree_round(table, shape, temperature)
    runs = {"plain": table.decode(0), "draft": draft, "verify": verify}
    samples = take_turns(runs, target.device)
    at = shape.nodes
    cost = round_cost(samples["plain"], {at: samples["verify"]}, {at: samples["draft"]}, at)
    gain = forecast(at, cost, tau)
    return TreeForecast(tree, gain, rows * gain.speedup.value / min(samples["plain"]))


def tree_round(
    table: Tables, shape: TreeShape, temperature: float
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A proposal of trees, and the target's pass over them with the verdict."""
    drafter, inputs = table.drafter, table.inputs(shape.nodes, temperature)
    assert isinstance(drafter, GrowsTrees)

    def draft() -> Any:
        return drafter.propose_tree(inputs, shape)

    with torch.inference_mode():
        proposal = draft()
    newest, device = table.context + NEW_TOKENS - 1, table.device
    lengths = proposal.lengths.tolist()
    parents = [row[:length] for row, length in zip(proposal.parents.tolist(), lengths)]
    positions, layout = tree_pass([TreeSpan(newest, 1, one) for one in parents], device)
    places = torch.tensor(positions, device=device)
    ids = torch.full((1, len(positions)), 7, device=device)
    wanted = torch.arange(len(positions), device=device)
    sampling = SamplingRows.of([temperature] * len(positions), device=device)
    seeds = torch.arange(table.rows, device=device)
    tree = DraftTree(proposal.tokens, proposal.parents, proposal.lengths)
    counts = torch.tensor([1 + length for length in lengths], device=device)

    def verify() -> Any:
        context = PagedPass(table.pool, table.tables, places, counts, tree=layout)
        output = table.target.forward(ids, places[None], context, wanted, drafter.taps)
        q_rows = None if proposal.logits is None else proposal.q_rows
        logits = process(output.logits, sampling)
        return verify_tree(logits, tree, proposal.logits, q_rows, seeds, seeds + newest + 1)

    return draft, verify
