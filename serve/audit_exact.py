"""Exact enumeration: every outcome of one round, with the kernels' own accept tests and residuals, in float64.

A round of depth K emits up to K + 1 tokens; what it leaves open of them is filled up by the target. The law of those K + 1
tokens must then be the target's. Legend: V vocabulary, C contexts, K depth.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import cache

import torch

from draftsmith.kernels.verify import accepts, residual_law, residual_logits
from draftsmith.kernels.verify_block import block_law
from draftsmith.kernels.verify_tree import SiblingLaw, sibling_law
from draftsmith.serve.audit_report import Check
from draftsmith.serve.audit_world import DEPTH, START, Law, World

VOCAB_SIZE = 4
EXACT_ERROR = 1e-12
BRANCHES = (3, 2, 1)  # children of a node at each depth of the enumerated tree

Residual = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Siblings = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], SiblingLaw]


def exact_checks(seed: int) -> list[Check]:
    laws = (Law(name="true q"), Law(name="filtered", temperature=0.8, top_k=3), Law(name="deterministic", deterministic=True))
    checks = []
    for law in laws:
        exact = Exact(law.world(vocab_size=VOCAB_SIZE, seed=seed, device=torch.device("cpu")), deterministic=law.deterministic)
        checks.append(_check(f"enumeration, chain, {law.name}", exact.chain_error()))
        if not law.deterministic:
            checks.append(_check(f"enumeration, block, {law.name}", exact.block_error()))
        checks.append(_check(f"enumeration, tree, {law.name}", exact.tree_error()))
    exact = Exact(laws[0].world(vocab_size=VOCAB_SIZE, seed=seed, device=torch.device("cpu")))
    broken = {
        "chain without residual": exact.chain_error(residual=lambda p_logits, q_logits: p_logits),
        "block judged by a chain's residual": exact.block_error(scaled=False),
        "tree, siblings judged as independent": exact.tree_error(siblings=independent_siblings),
    }
    checks += [_check(f"control: enumeration, {name}", error, control=True) for name, error in broken.items()]
    return [*checks, *edge_checks()]


def _check(name: str, error: float, *, control: bool = False) -> Check:
    said = f"largest error of a probability {error:.1e}"
    passed = (error < EXACT_ERROR) != control
    return Check(name=name, kind="control" if control else "law", passed=passed, said=said, evidence={"error": error})


def edge_checks() -> list[Check]:
    """u = 0, p(x) = 0 and q(x) = 0, which no sample of a sound stream would bring about."""
    held = not _keeps_nothing_possible(accepts)
    seen = _keeps_nothing_possible(lambda log_u, log_p, log_q: (log_u + log_q <= log_p) & (log_q > -math.inf))
    return [
        Check(name="u = 0, p(x) = 0, q(x) = 0 keep nothing", kind="law", passed=held, said="by the accept test"),
        Check(name="control: accept test with <=", kind="control", passed=seen, said="keeps a token without mass at u = 0"),
    ]


def _keeps_nothing_possible(accept: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> bool:
    """Whether a token without mass in p or in q can be kept."""
    nothing = torch.tensor([-math.inf], dtype=torch.float64)
    zero = torch.zeros(1, dtype=torch.float64)
    cases = ((nothing, nothing, zero), (nothing, nothing, zero - 1), (zero - 1, nothing, zero), (zero - 1, zero, nothing))
    return any(bool(accept(*case)) for case in cases)


class Exact:
    """A world in float64, its first draft."""

    def __init__(self, world: World, *, deterministic: bool = False):
        self.world, self.size, self.deterministic = world, world.vocab_size, deterministic
        self.p_logits, self.q_logits = world.p_logits[0].double(), world.q_logits[0].double()
        if deterministic:
            likeliest = self.q_logits.argmax(dim=-1, keepdim=True)
            self.one_hot = torch.full_like(self.q_logits, -math.inf).scatter_(-1, likeliest, 0.0)
        else:
            self.one_hot = self.q_logits
        self.log_p, self.log_q = self.p_logits.log_softmax(-1), self.one_hot.log_softmax(-1)

    def target(self, context: int, length: int) -> torch.Tensor:
        """[V] * length: the target's law of the next tokens."""
        p = self.log_p[context].exp()
        if length <= 1:
            return p if length else torch.ones((), dtype=torch.float64)
        return torch.stack([p[token] * self.target(self._after(context, token), length - 1) for token in range(self.size)])

    def chain_error(self, residual: Residual = residual_logits) -> float:
        accept = accept_probability(self.log_p, self.log_q)
        rest = residual(self.p_logits, self.one_hot).softmax(-1)

        def emitted(context: int, left: int) -> torch.Tensor:
            if left == 0:
                return self.log_p[context].exp()
            q = self.log_q[context].exp()
            kept = q * accept[context]
            law = float((q - kept).sum()) * self._filled(rest[context], context, left)
            for token in range(self.size):
                law[token] += kept[token] * emitted(self._after(context, token), left - 1)
            return law

        return self._error(emitted(START, DEPTH))

    def block_error(self, *, scaled: bool = True) -> float:
        """Over all drafts of K tokens; `scaled` False takes a chain's residual, max(p - q, 0), instead of max(r p - q, 0)."""
        drafts = torch.tensor(list(itertools.product(range(self.size), repeat=DEPTH)))
        contexts = [torch.full((len(drafts),), START)]
        for step in range(DEPTH):
            contexts.append(self.world.after(contexts[-1], drafts[:, step]))
        path = torch.stack(contexts, dim=1)
        log_p, log_q = self.log_p[path], self.log_q[path[:, :-1]]
        found = block_law(log_p, log_q, drafts, torch.full((len(drafts),), DEPTH))
        drawn = log_q.gather(-1, drafts[..., None])[..., 0].sum(dim=1).exp()
        law = torch.zeros((self.size,) * (DEPTH + 1), dtype=torch.float64)
        for place in range(DEPTH + 1):
            # The latest test that stands decides.
            chance = drawn * found.stop[:, place] * (1 - found.stop[:, place + 1 :]).prod(dim=1)
            reach = found.log_reach[:, place, None] if scaled else 0.0
            rest = log_p[:, place] if place == DEPTH else residual_law(log_p[:, place] + reach, log_q[:, place])
            for row in (chance > 0).nonzero()[:, 0].tolist():
                ends = self._filled(rest[row].softmax(-1), int(path[row, place]), DEPTH - place)
                law[tuple(drafts[row, :place].tolist())] += chance[row] * ends
        return self._error(law)

    def tree_error(self, siblings: Siblings = sibling_law) -> float:
        @cache
        def emitted(context: int, depth: int) -> torch.Tensor:
            if depth == DEPTH:
                return self.log_p[context].exp()
            law = torch.zeros((self.size,) * (DEPTH + 1 - depth), dtype=torch.float64)
            for tokens, chance in self._children(context, BRANCHES[depth]):
                found = siblings(self.log_p[context], None if self.deterministic else self.log_q[context], torch.tensor(tokens))
                for token, keep in zip(tokens, found.keep.tolist()):
                    law[token] += chance * keep * emitted(self._after(context, token), depth + 1)
                    chance *= 1 - keep
                if chance > 0:
                    law += chance * self._filled(found.left.softmax(-1), context, DEPTH - depth)
            return law

        return self._error(emitted(START, 0))

    def _children(self, context: int, count: int) -> list[tuple[tuple[int, ...], float]]:
        """All ordered draws of different tokens with their chances; a law with fewer tokens gives as many as it has."""
        if self.deterministic:
            return [(tuple(self.q_logits[context].topk(count).indices.tolist()), 1.0)]
        q = self.log_q[context].exp().tolist()
        possible = [token for token in range(self.size) if q[token] > 0]
        draws = []
        for tokens in itertools.permutations(possible, min(count, len(possible))):
            chance, left = 1.0, 1.0
            for token in tokens:
                chance, left = chance * q[token] / left, left - q[token]
            draws.append((tokens, chance))
        return draws

    def _filled(self, law: torch.Tensor, context: int, more: int) -> torch.Tensor:
        """[V] * (1 + more): a token of `law`, then `more` of the target's."""
        ends = [law[token] * self.target(self._after(context, token), more) for token in range(self.size)]
        return torch.stack(ends)

    def _after(self, context: int, token: int) -> int:
        return context * self.size + token + 1

    def _error(self, law: torch.Tensor) -> float:
        return float((law - self.target(START, DEPTH + 1)).abs().max())


def accept_probability(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """The measure of the uniforms that `accepts` keeps, found by bisection on that very function."""
    low, high = torch.zeros_like(log_p), torch.ones_like(log_p)
    for _ in range(200):
        middle = (low + high) / 2
        kept = accepts(middle.log(), log_p, log_q)
        low, high = torch.where(kept, middle, low), torch.where(kept, high, middle)
    return high


def independent_siblings(log_p: torch.Tensor, log_q: torch.Tensor | None, tokens: Sequence[int] | torch.Tensor) -> SiblingLaw:
    """Siblings drawn without replacement, judged as if each had been drawn from the whole of q: a control."""
    assert log_q is not None
    keep, left = [], log_p
    for token in torch.as_tensor(tokens).tolist():
        keep.append((left[token] - log_q[token]).exp().clamp(max=1))
        rest = residual_law(left[None], log_q[None])[0]
        left = rest.log_softmax(-1) if bool((rest > -math.inf).any()) else log_p
    return SiblingLaw(torch.stack(keep), left)
