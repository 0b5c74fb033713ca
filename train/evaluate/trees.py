"""tau of draft trees by shape, measured by lossless decoding, with 95 % intervals over prompts.

What a tree keeps at a temperature above 0 depends on tokens that the text does not hold, so nothing
is worked out by teacher forcing here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from draftsmith.drafters.interface import ServingDrafter, check_grows
from draftsmith.drafters.speculate_trees import speculate_trees
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.tree_shape import parse_tree
from draftsmith.kernels.acceptance import AcceptanceCounts
from draftsmith.train.data.dataset import TokenSequence
from draftsmith.train.evaluate.estimate import Estimate, ratio
from draftsmith.train.evaluate.measured import decoded

METHOD = "real lossless decoding with draft trees, bootstrap over prompts"


class TreeTau(NamedTuple):
    """Figures of one shape at one temperature."""

    tree: str
    temperature: float
    nodes: int  # most of a round
    depth: int
    rounds: int
    tau: Estimate

    def to_dict(self) -> dict[str, Any]:
        return self._asdict() | {"tau": self.tau._asdict(), "method": METHOD}


def measure_tree(
    drafter: ServingDrafter,
    target: Target,
    sequences: Sequence[TokenSequence],
    *,
    tree: str,
    temperature: float,
    max_new_tokens: int,
    batch_size: int,
    seed: int = 0,
) -> TreeTau:
    """Decode the prompts of `sequences` with trees of the shape `tree`."""
    shape = parse_tree(tree)
    check_grows(drafter, shape)
    decode = partial(
        speculate_trees,
        drafter,
        target,
        shape=shape,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
    )
    texts = decoded(decode, sequences, batch_size=batch_size, seed=seed)
    by_name: dict[str, AcceptanceCounts] = defaultdict(AcceptanceCounts)
    for sequence, text in zip(sequences, texts, strict=True):
        by_name[sequence.name].merge(text.counts())  # turns of a conversation depend
    rounds = [one.rounds for one in by_name.values()]
    tau = ratio([one.num_committed for one in by_name.values()], rounds)
    return TreeTau(tree, temperature, shape.nodes, shape.depth, sum(rounds), tau)
