"""The divergence cases of the kernel benchmark: forward and backward, from hidden states to both
gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from draftsmith.kernels.divergence.fused import default_chunk_size, divergence
from draftsmith.kernels.divergence.kind import DivergenceKind, kind_of
from scripts.bench.kernels.case import Call, Case, Sizes
from scripts.bench.kernels.peers import has_liger, liger_forward_kl, liger_jsd

KINDS = ("forward-kl", "jsd", "tv", "lk-alpha", "reverse-kl", "ce")


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


def divergence_cases(sizes: Sizes, device: torch.device) -> Iterator[Callable[[], Case]]:
    for vocab_size in sizes.divergence_vocabularies:
        for name in KINDS:
            yield partial(divergence_case, name, sizes, vocab_size, device)


def divergence_case(name: str, sizes: Sizes, vocab_size: int, device: torch.device) -> Case:
    """Forward KL is to given target logits, which is what Liger's fused KL takes (as
    probabilities), the others are from both hidden states."""
    pair, kind, is_given = make_pair(sizes, vocab_size, device), kind_of(name), name == "forward-kl"
    hidden, head = pair.target_hidden, pair.target_head
    given = hidden @ head.T if is_given else torch.empty(0)
    target = given.__getitem__ if is_given else lambda rows: hidden[rows] @ head.T
    tokens = pair.tokens if name == "ce" else None

    def ours() -> Any:
        found = divergence(kind, pair.hidden, pair.head, target, pair.weights, tokens=tokens)
        return backward(found.loss, pair)

    def eager() -> Any:
        logits = given if is_given else pair.target_hidden @ pair.target_head.T
        rows = eager_rows(kind, pair.hidden @ pair.head.T, logits, pair.tokens)
        return backward((rows * pair.weights).sum(), pair)

    with_target = products(pair, with_target=not is_given)
    ways: dict[str, Call] = {"ours": ours, "reference": eager, "products": with_target}
    if has_liger(device) and is_given:
        ways["liger"] = liger_forward_kl(pair.hidden, pair.head, given, None)
        ways["liger float32 sums"] = liger_forward_kl(pair.hidden, pair.head, given, torch.float32)
    if has_liger(device) and name == "jsd":
        ways["liger"] = liger_jsd(pair.hidden, pair.head, pair.target_hidden, pair.target_head)
    seen = "target logits given" if is_given else "from both hidden states"
    shape = f"{sizes.tokens} tokens x {sizes.width}, forward and backward"
    middle = sizes.divergence_vocabularies[len(sizes.divergence_vocabularies) // 2]
    compiled = ["reference"] if vocab_size == middle else []
    return Case(f"{name}, {seen}, V {vocab_size}", shape, 0, ways, compiled)
