"""Shapes of draft trees and the text that names them. Torch-free."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from itertools import accumulate

from draftsmith.errors import UserError
from draftsmith.kernels.constants import MAX_NODES

FORMS = (
    "'auto', 'dynamic', 'dynamic:nodes=24,depth=5,width=4', 'sampled:3x2x1x1', two of these joined "
    "by '+', 'medusa' or 'choices:0,0.0,1'"
)
# Medusa's published choices for a 7B target (`mc_sim_7b_63` of its medusa_choices.py), a digit the
# rank of a head's token, best first; its 63rd, 070, has no bit left (`MAX_NODES`).
MEDUSA_CHOICES = (
    "0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 "
    "40 21 004 005 0000 011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 "
    "90 060 0001 16"
)


@dataclass(frozen=True, kw_only=True)
class DynamicTree:
    """EAGLE-2's (arXiv 2406.16858): at each depth the `width` likeliest nodes get their `width`
    likeliest children, and of all these the `nodes` likeliest are offered. Likely is the product of
    the draft's own probabilities on the way; nothing is drawn.
    """

    nodes: int = 24
    depth: int = 5
    width: int = 4

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 1 <= value <= MAX_NODES:
                raise UserError(
                    f"{name} of the tree is {value}; it must be at least 1 and at most {MAX_NODES}"
                )
        if self.num_read > self.nodes + 1:
            raise UserError(
                f"the tree reads width * (depth - 1) = {self.num_read} nodes but offers only "
                f"{self.nodes}; offer more nodes, or "
                "make it less wide or less deep"
            )

    @property
    def num_read(self) -> int:
        """Nodes that the draft reads to grow the tree: the last depth's are only offered."""
        return self.width * (self.depth - 1)


@dataclass(frozen=True, kw_only=True)
class SampledTree:
    """Every node of depth d gets `branches[d]` children, drawn from the draft's distribution
    without replacement."""

    branches: tuple[int, ...] = (3, 2, 1, 1)

    def __post_init__(self) -> None:
        if not self.branches or min(self.branches) < 1:
            raise UserError(
                f"the tree has branches {self.branches}; give a number of children, at least 1, "
                "for each depth"
            )
        if self.nodes > MAX_NODES:
            raise UserError(f"the tree has {self.nodes} nodes; at most {MAX_NODES} are possible")

    @property
    def depth(self) -> int:
        return len(self.branches)

    @property
    def nodes(self) -> int:
        return sum(self.level_sizes)

    @property
    def level_sizes(self) -> list[int]:
        return list(
            accumulate(self.branches, lambda size, count: min(size * count, 10 * MAX_NODES))
        )


@dataclass(frozen=True, kw_only=True)
class FixedTree:
    """Medusa's (arXiv 2401.10774): node (r_1, ..., r_d) is the r_d-th likeliest token, from 0, of
    depth d under node (r_1, ..., r_d-1). A smaller tree has the first of `choices`."""

    choices: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= MAX_NODES:
            raise UserError(f"the tree has {self.nodes} nodes; give 1 to {MAX_NODES}")
        for at, path in enumerate(self.choices):
            name, before = ".".join(map(str, path)), self.choices[:at]
            if len(path) > 1 and path[:-1] not in before:
                raise UserError(
                    f"choice {name} of the tree comes before the choice that it continues; put "
                    f"{'.'.join(map(str, path[:-1]))} in front of it"
                )
            if path in before:
                raise UserError(f"choice {name} of the tree is given twice; leave one of them out")

    @property
    def nodes(self) -> int:
        return len(self.choices)

    @property
    def depth(self) -> int:
        return max(map(len, self.choices))


@dataclass(frozen=True, kw_only=True)
class SampledShape:
    """Greedy requests get the one, sampled ones the other: what is not drawn is kept less often the
    more a distribution spreads."""

    greedy: DynamicTree = DynamicTree()
    sampled: SampledTree = SampledTree()

    @property
    def nodes(self) -> int:
        return max(self.greedy.nodes, self.sampled.nodes)

    @property
    def depth(self) -> int:
        return max(self.greedy.depth, self.sampled.depth)


GrownShape = DynamicTree | SampledTree | SampledShape
TreeShape = GrownShape | FixedTree


def parse_tree(text: str) -> TreeShape:
    """`FORMS`, numbers left out being the defaults; 'auto' is 'dynamic+sampled'."""
    if text == "auto":
        return SampledShape()
    if text == "medusa":
        choices = MEDUSA_CHOICES.split()
        return FixedTree(choices=tuple(tuple(map(int, path)) for path in choices))
    if re.fullmatch(r"choices:\d+(\.\d+)*(,\d+(\.\d+)*)*", text):
        paths = text.removeprefix("choices:").split(",")
        return FixedTree(choices=tuple(tuple(map(int, path.split("."))) for path in paths))
    first, joined, second = text.partition("+")
    if not joined:
        return _parse_one(text, text)
    greedy, sampled = _parse_one(first, text), _parse_one(second, text)
    if isinstance(greedy, DynamicTree) and isinstance(sampled, SampledTree):
        return SampledShape(greedy=greedy, sampled=sampled)
    raise UserError(f"tree is {text!r}; of two trees the first must be dynamic, the second sampled")


def _parse_one(text: str, whole: str) -> DynamicTree | SampledTree:
    kind, _, rest = text.partition(":")
    if kind == "sampled" and re.fullmatch(r"(\d+(x\d+)*)?", rest):
        return SampledTree(branches=tuple(map(int, rest.split("x")))) if rest else SampledTree()
    if kind == "dynamic" and re.fullmatch(r"(\w+=\d+(,\w+=\d+)*)?", rest):
        values = dict(part.split("=") for part in rest.split(",")) if rest else {}
        if values.keys() <= {"nodes", "depth", "width"}:
            return DynamicTree(**{name: int(value) for name, value in values.items()})
    raise UserError(f"tree is {whole!r}; give {FORMS}")
