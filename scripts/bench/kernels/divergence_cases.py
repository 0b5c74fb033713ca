"""The divergence cases of the kernel benchmark: forward and backward, from hidden states to both
gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from draftsmith.kernels.divergence.fused import HeadLogits, default_chunk_size, divergence
from draftsmith.kernels.divergence.kind import DivergenceKind, kind_of
from scripts.bench.kernels.peers import has_liger, liger_forward_kl, liger_jsd

if TYPE_CHECKING:
    from scripts.bench.kernels.case import Case, Sizes

KINDS = ("jsd", "tv", "lk-alpha", "reverse-kl", "ce")


class Pair(NamedTuple):
    hidden: torch.Tensor  # [T, H], requires a gradient
    head: torch.Tensor  # [V, H], requires a gradient
    target_hidden: torch.Tensor  # [T, H]
    target_head: torch.Tensor  # [V, H]
    weights: torch.Tensor  # [T]
    tokens: torch.Tensor  # [T] the text's, for ce


def make_pair(sizes: Sizes, vocab_size: int, device: torch.device) -> Pair:
    """Logits with a deviation of about 2, and a draft that is the target with noise."""
    generator = torch.Generator(device).manual_seed(vocab_size)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def normal(*shape: int, scale: float) -> torch.Tensor:
        return (scale * torch.randn(*shape, generator=generator, device=device)).to(dtype)

    target_hidden = normal(sizes.tokens, sizes.width, scale=1.0)
    target_head = normal(vocab_size, sizes.width, scale=2 * sizes.width**-0.5)
    hidden = (target_hidden + normal(sizes.tokens, sizes.width, scale=0.3)).requires_grad_()
    head = (
        target_head + normal(vocab_size, sizes.width, scale=0.3 * sizes.width**-0.5)
    ).requires_grad_()
    tokens = torch.randint(vocab_size, (sizes.tokens,), generator=generator, device=device)
    return Pair(
        hidden, head, target_hidden, target_head, torch.ones(sizes.tokens, device=device), tokens
    )


def eager_rows(
    kind: DivergenceKind,
    draft_logits: torch.Tensor,
    target_logits: torch.Tensor,
    tokens: torch.Tensor,
) -> torch.Tensor:
    """[T] as one writes it without thinking of memory."""
    log_q, name = draft_logits.float().log_softmax(-1), kind.name
    if name == "ce":
        return -log_q.gather(-1, tokens[:, None])[:, 0]
    log_p = target_logits.float().log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    if name == "forward-kl":
        return (p * (log_p - log_q)).sum(-1)
    if name == "reverse-kl":
        return (q * (log_q - log_p)).sum(-1)
    if name == "jsd":
        log_m = (0.5 * (p + q)).log()
        return 0.5 * (p * (log_p - log_m) + q * (log_q - log_m)).sum(-1)
    alpha = torch.minimum(p, q).sum(-1)
    return 1 - alpha if name == "tv" else -alpha.log()


def backward(loss: torch.Tensor, pair: Pair) -> tuple[torch.Tensor, ...]:
    """Both gradients, as fresh tensors."""
    return torch.autograd.grad(loss, (pair.hidden, pair.head))


def products(pair: Pair, *, with_target: bool) -> Callable[[], None]:
    """The matrix products alone, in our chunks: what no divergence can do without."""
    hidden, head = pair.hidden.detach(), pair.head.detach()
    chunk = default_chunk_size(hidden.device, len(head), hidden.dtype)

    def call() -> None:
        total, grad_hidden = torch.zeros_like(head), torch.empty_like(hidden)
        for begin in range(0, len(hidden), chunk):
            part = slice(begin, begin + chunk)
            logits = hidden[part] @ head.T
            if with_target:
                pair.target_hidden[part] @ pair.target_head.T
            grad_hidden[part] = logits @ head
            total.addmm_(logits.T, hidden[part])
            del logits

    return call


def divergence_cases(
    sizes: Sizes, device: torch.device, case: type[Case]
) -> Iterator[Callable[[], Case]]:
    for vocab_size in sizes.divergence_vocabularies:
        yield partial(given_logits_case, sizes, vocab_size, device, case)
        for name in KINDS:
            yield partial(both_heads_case, name, sizes, vocab_size, device, case)


def compiled(sizes: Sizes, vocab_size: int) -> list[str]:
    """As `Sizes.compiled`, at the vocabularies that divergences are measured at."""
    middle = sizes.divergence_vocabularies[len(sizes.divergence_vocabularies) // 2]
    return ["reference"] if vocab_size == middle else []


def _shape(sizes: Sizes) -> str:
    return f"{sizes.tokens} tokens x {sizes.width}, forward and backward"


def given_logits_case(
    sizes: Sizes, vocab_size: int, device: torch.device, case: type[Case]
) -> Case:
    """Forward KL to given target logits, which is what Liger's fused KL takes (as
    probabilities)."""
    pair, kind = make_pair(sizes, vocab_size, device), kind_of("forward-kl")
    target = pair.target_hidden @ pair.target_head.T

    def ours() -> Any:
        return backward(
            divergence(kind, pair.hidden, pair.head, lambda rows: target[rows], pair.weights).loss,
            pair,
        )

    def eager() -> Any:
        return backward(
            (eager_rows(kind, pair.hidden @ pair.head.T, target, pair.tokens) * pair.weights).sum(),
            pair,
        )

    ways: dict[str, Callable[[], Any]] = {
        "ours": ours,
        "reference": eager,
        "products": products(pair, with_target=False),
    }
    if has_liger(device):
        ways["liger"] = liger_forward_kl(pair.hidden, pair.head, target, None)
        ways["liger float32 sums"] = liger_forward_kl(pair.hidden, pair.head, target, torch.float32)
    return case(
        f"forward-kl, target logits given, V {vocab_size}",
        _shape(sizes),
        0,
        ways,
        compiled(sizes, vocab_size),
    )


def both_heads_case(
    name: str, sizes: Sizes, vocab_size: int, device: torch.device, case: type[Case]
) -> Case:
    pair, kind = make_pair(sizes, vocab_size, device), kind_of(name)
    target, tokens = (
        HeadLogits(pair.target_hidden, pair.target_head),
        pair.tokens if name == "ce" else None,
    )

    def ours() -> Any:
        return backward(
            divergence(kind, pair.hidden, pair.head, target, pair.weights, tokens=tokens).loss, pair
        )

    def eager() -> Any:
        with torch.no_grad():
            target_logits = pair.target_hidden @ pair.target_head.T
        return backward(
            (
                eager_rows(kind, pair.hidden @ pair.head.T, target_logits, pair.tokens)
                * pair.weights
            ).sum(),
            pair,
        )

    ways: dict[str, Callable[[], Any]] = {
        "ours": ours,
        "reference": eager,
        "products": products(pair, with_target=True),
    }
    if name == "jsd" and has_liger(device):
        ways["liger"] = liger_jsd(pair.hidden, pair.head, pair.target_hidden, pair.target_head)
    return case(
        f"{name}, from both hidden states, V {vocab_size}",
        _shape(sizes),
        0,
        ways,
        compiled(sizes, vocab_size),
    )
