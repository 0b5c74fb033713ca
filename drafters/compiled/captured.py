"""The two parts of a causal LM as captured forwards, checked against the model before anything
relies on them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch.fx import GraphModule, Node

from draftsmith.drafters.compiled.capture import NUM_TOKENS, capture
from draftsmith.drafters.compiled.one_call import one_call
from draftsmith.drafters.compiled.packed_linear import PackedLinear
from draftsmith.drafters.compiled.patterns import tensor
from draftsmith.drafters.compiled.rewrite import rewrite
from draftsmith.drafters.interface import ForwardCapturable
from draftsmith.drafters.target.attention import AttentionContext
from draftsmith.drafters.target.causal_lm import CapturedLm, CausalLM
from draftsmith.drafters.target.taps import FINAL
from draftsmith.errors import first_line
from draftsmith.kernels.attention.paged import PagedPass
from draftsmith.kernels.attention.pool import PagedPool
from draftsmith.kernels.dispatch import backend_of
from draftsmith.kernels.host_memory import affordable_copies
from draftsmith.progress import awaited

if TYPE_CHECKING:
    from draftsmith.drafters.compiled.device_rewrite import JoinedLinear

log = logging.getLogger(__name__)
T = TypeVar("T")
# Largest allowed difference from the model's own pass, relative by row.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}
# Pieces of one text as serving feeds them: a prompt, single tokens, a verification.
PIECES = (9, 1, 5, 1, 2)


class Mismatch(Exception):
    """A captured forward does not give what the model's own gives."""


def capture_forwards(target: CausalLM, drafter: object) -> None:
    """Lets whichever of the two can be captured run from its captured forward."""
    begun_s = perf_counter()
    capture_lm(target)
    if isinstance(drafter, ForwardCapturable):
        drafter.capture_forward()
    if target.captured:
        log.info("forwards captured in %.1f s", perf_counter() - begun_s)


def steps_for(
    device: torch.device, dtype: torch.dtype, impl: str = "auto"
) -> Literal["cpu", "triton"] | None:
    """The choice of what a captured forward is made of; None: nothing is captured there."""
    found = backend_of(impl, device, dtype)
    return None if found == "torch" else found


def capture_lm(lm: CausalLM, impl: str = "auto") -> None:
    """Lets `lm` run from its captured forward: on a CPU with less overhead, and with two copies of
    its weights (`rewrite`) where memory allows, on CUDA with fewer launches. Does nothing where
    the model cannot be captured or has layers with a state."""
    steps = steps_for(lm.device, lm.dtype, impl)
    if lm.captured or steps is None or lm.state_layers:
        return
    with awaited(f"capturing the passes of {lm.name}"):
        lm.replay(attempt(lm.name, lambda: _capture(lm, steps), log_level(steps)))


def log_level(steps: Literal["cpu", "triton"]) -> int:
    """Level of the line that a capture failed: on CUDA the own forward is several times slower."""
    return logging.INFO if steps == "cpu" else logging.WARNING


def attempt(name: str, capture: Callable[[], T], level: int = logging.INFO) -> T | None:
    """None, with the reason in the log, where `capture` fails."""
    try:
        return capture()
    except Exception as error:
        # Whatever a family's code does that a capture cannot follow: its own forward serves it.
        log.log(
            level,
            "%s runs without a captured forward (%s: %s)",
            name,
            type(error).__name__,
            first_line(error)[:200],
        )
        return None


def _capture(lm: CausalLM, steps: Literal["cpu", "triton"]) -> CapturedLm:
    ids = torch.arange(NUM_TOKENS, device=lm.device)[None]
    states = torch.zeros(1, NUM_TOKENS, lm.hidden_size, dtype=lm.dtype, device=lm.device)
    num_bytes = sum(weight.numel() * weight.element_size() for weight in lm.model.parameters())
    copies = min(2, affordable_copies(num_bytes))
    body = Replay(lambda *inputs: _every_state(lm, *inputs), [ids, ids], copies=copies, steps=steps)
    head = Replay(lambda rows, context: lm.own_head(rows), [states], copies=copies, steps=steps)
    captured = CapturedLm(body, head)
    if steps == "triton":
        torch.cuda.empty_cache()  # where weights lay before they were joined
    _check(lm, captured)
    return captured


def _every_state(
    lm: CausalLM, input_ids: torch.Tensor, positions: torch.Tensor, context: AttentionContext
) -> list[torch.Tensor]:
    raw_ids = range(lm.num_layers + 1)
    states = lm.own_paged(input_ids, positions, context, raw_ids)
    return [states[tap] for tap in (FINAL, *raw_ids)]


@torch.no_grad()
def _check(lm: CausalLM, captured: CapturedLm) -> None:
    """The same text through both, piece by piece: every state, every logit, all keys and values."""
    own, replayed = (lm.new_pool(2, sum(PIECES)) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    begin = 0
    for count in PIECES:
        ids = torch.randint(lm.vocab_size, (1, count), generator=generator).to(lm.device)
        positions = torch.arange(begin, begin + count, device=lm.device)
        expected = _every_state(lm, ids, positions[None], pass_over(own, positions))
        found = captured.body(
            ids, positions[None], attention_context=pass_over(replayed, positions)
        )
        for one, other in zip(found, expected, strict=True):
            compare(one, other)
        compare(captured.head(expected[0]), lm.own_head(expected[0]))
        begin += count
    for one, other in zip((*replayed.keys, *replayed.values), (*own.keys, *own.values)):
        compare(one, other)


def pass_over(pool: PagedPool, positions: torch.Tensor) -> AttentionContext:
    """One row in block 1."""
    table = torch.ones(1, 1, dtype=torch.int64, device=positions.device)
    return PagedPass(
        pool, table, positions, torch.tensor([len(positions)], device=positions.device)
    )


def compare(found: torch.Tensor, expected: torch.Tensor) -> None:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise Mismatch(
            f"{tuple(found.shape)} {found.dtype} for {tuple(expected.shape)} {expected.dtype}"
        )
    # By row, and the median of them: where a router is near a tie, rounding may send a row to
    # another expert.
    norms = (found - expected).double().norm(dim=-1) / expected.double().norm(dim=-1).clamp(
        min=1e-12
    )
    error = norms.median()
    if not error.item() <= TOLERANCE[expected.dtype]:
        raise Mismatch(f"it differs from the model's own by {error.item():.1e}")


class Replay:
    """`replay(*inputs, attention_context)` gives what the captured function gave, without its
    Python.

    Weights are the model's own tensors, so that new values copied into them count; `refresh` says
    that this happened. `copies`: see `rewrite`. `steps` between products are those for a CPU or
    Triton's; see `captured.steps_for`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        examples: Sequence[torch.Tensor],
        *,
        copies: int = 2,
        steps: Literal["cpu", "triton"] = "cpu",
    ):
        module = capture(function, examples)
        self._packed: Sequence[PackedLinear | JoinedLinear]  # laid out again by `refresh`
        if steps == "cpu":
            self._packed = rewrite(module, copies=copies)
        else:
            from draftsmith.drafters.compiled.device_rewrite import rewrite_for_device

            self._packed = rewrite_for_device(module)
        constants = _lift_constants(module)
        self._constants = list(constants.values())
        module.recompile()
        self.graph = module.graph
        self._run = module.forward
        self._one_call = one_call(module.graph, constants) if steps == "cpu" else None

    def __call__(
        self, *inputs: torch.Tensor, attention_context: AttentionContext | None = None
    ) -> Any:
        if self._one_call is not None:
            found = self._one_call(inputs, attention_context)
            if found is not None:
                return found
        return self._run(*inputs, attention_context, *self._constants)

    def refresh(self) -> None:
        changed = [packed.refresh() for packed in self._packed]
        if self._one_call is not None and any(changed):
            self._one_call.refresh()


def _lift_constants(module: GraphModule) -> dict[Node, Any]:
    """Attributes of a module are slow to read: they become its last inputs, given every
    time."""
    graph = module.graph
    nodes: dict[str, Node] = {}
    constants: dict[Node, Any] = {}
    last_input = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for node in list(graph.nodes):
        if node.op != "get_attr":
            continue
        if node.target not in nodes:
            value = tensor(module, node)
            with graph.inserting_after(last_input):
                last_input = graph.placeholder(f"constant_{len(constants) + 1}")
            nodes[node.target], constants[last_input] = last_input, value
        node.replace_all_uses_with(nodes[node.target])
        graph.erase_node(node)
    return constants
