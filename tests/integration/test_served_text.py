"""Served text does not depend on drafting, whatever happens around a request: greedy text is the
target's alone, sampled text that of `speculate`, round for round, for every family, every way to
draft and verify, and with the compiled kernels or without."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from draftsmith.drafters import checkpoint
from draftsmith.drafters.interface import DraftInputs, Proposal, ServingDrafter
from draftsmith.drafters.speculate import SpeculatedText, speculate
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.tree_shape import parse_tree
from draftsmith.kernels.sampling import draw as draw_module
from draftsmith.kernels.verify import chain
from draftsmith.kernels.verify.chain import _kernel
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.engine import EngineCore
from draftsmith.serve.requests.request import Request
from draftsmith.serve.sampling.params import SamplingParams
from tests.foreign_lm import write_foreign
from tests.integration.served import (
    GREEDY,
    TEXT,
    TRAINED,
    Around,
    Greedy,
    Oracle,
    TreeOracle,
    assert_same,
    finish,
    make_drafter,
    plain_greedy,
    prompts,
)
from tests.speculate_trees import speculate_trees

CAPTURED = True
DYNAMIC, SAMPLED = "dynamic:nodes=12,depth=4,width=3", "sampled:3x2x1"
MODES: dict[str, dict[str, Any]] = {
    "chain": {},
    "not compiled": {"compile": "off"},
    "block": {"verification": "block"},
    "dynamic": {"tree": DYNAMIC},
    "sampled": {"tree": SAMPLED, "compile": "off"},
    "mixed": {"tree": f"{DYNAMIC}+{SAMPLED}"},
    "choices": {"tree": "medusa"},
}
# Prompts come in pieces beside answers, and the latest request is put back again and again.
CROWDED: dict[str, Any] = {
    "k": 3, "max_batch": 3, "max_round_tokens": 11, "num_blocks": 14, "block_size": 8, "max_length": 80,
}  # fmt: skip
TREES: dict[str, Any] = {"max_batch": 5, "block_size": 8, "num_blocks": 18, "max_length": 80}


class Cell(NamedTuple):
    """What drafts, how it drafts and is verified, and the target's architecture."""

    family: str
    mode: str = "chain"
    arch: str = "llama"

    def __str__(self) -> str:
        usual = (None, "chain", "llama")
        return "-".join(name for name, other in zip(self, usual) if name != other)


# A family of each kind: states, heads apart, blocks, a model; the others are in the long lane.
KINDS = ("eagle3", "medusa", "dflash", "draft-lm")
# "shipped" is the MTP module that a target brings along.
CELLS = [
    *(Cell(family) for family in (*TEXT, *KINDS, "eagle3 subset", "foreign")),
    Cell("draft-lm", "block"),
    Cell("eagle3", "not compiled"),
    Cell("eagle3", "dynamic", "mistral"),
    Cell("eagle3", "sampled", "llama4"),
    Cell("medusa", "choices"),
    Cell("shipped", "not compiled", "native glm4_moe"),
    Cell("none"),
    Cell("suffix", arch="lfm2"),
    Cell("eagle3", arch="qwen3_next"),
]  # fmt: skip
ARCHITECTURES = ("qwen3", "mistral", "gemma", "gpt_neox", "qwen3_moe")
LATER = [
    *(Cell(family) for family in TRAINED if family not in KINDS),
    *(Cell("shipped", arch=f"native {kind}") for kind in ("deepseek_v3", "glm4_moe_lite")),
    Cell("suffix", arch="jamba"),
    *(Cell("eagle3", arch=arch) for arch in ARCHITECTURES),
    # Drafts across the ends of chunks of 16 tokens, with scales of queries by position.
    Cell("draft-lm", arch="llama4"),
    Cell("mtp", "dynamic", "gemma2"),
    Cell("eagle1", "sampled"),
    Cell("medusa", "block"),
]  # fmt: skip


class Compared(Around):
    """Checks that every proposal from the incremental cache equals one computed from nothing."""

    def __init__(self, drafter: ServingDrafter, target: Target):
        super().__init__(drafter)
        del self.propose
        self.target, self.compared = target, 0

    def propose(self, inputs: DraftInputs) -> Proposal:
        proposal = self.drafter.propose(inputs)
        for row, history in enumerate(inputs.histories):
            fresh = self.drafter.propose(self._fresh(inputs, row, history))
            length = int(proposal.lengths[row])
            assert fresh.lengths.tolist() == [length]
            assert fresh.tokens[0, :length].tolist() == proposal.tokens[row, :length].tolist()
            if proposal.logits is not None:
                torch.testing.assert_close(
                    proposal.logits[row, :length].softmax(-1),
                    fresh.logits[0, :length].softmax(-1),
                    atol=2e-4,
                    rtol=1e-3,
                )
            self.compared += 1
        return proposal

    def _fresh(self, inputs: DraftInputs, row: int, history: list[int]) -> DraftInputs:
        tokens = torch.tensor(history)
        num_blocks = -(-(len(history) + 8) // 16)
        taps = None
        if self.taps:
            read, _ = self.target.states(
                tokens[None, :-1], torch.ones(1, len(history) - 1), self.taps
            )
            taps = read[0]
        return replace(
            inputs,
            tokens=tokens,
            starts=torch.tensor([0]),
            lengths=torch.tensor([len(history)]),
            taps=taps,
            num_draft=inputs.num_draft[row : row + 1],
            sampling=inputs.sampling.select(torch.tensor([row])),
            seeds=inputs.seeds[row : row + 1],
            pool=self.new_pool(num_blocks + 1, 16, torch.device("cpu"), torch.float32),
            block_tables=torch.arange(1, num_blocks + 1)[None],
            histories=[history],
        )


@pytest.fixture(scope="module")
def drafter_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ServingDrafter | None]:
    def make(family: str, target: Target) -> ServingDrafter | None:
        if family == "none":
            return None
        if family == "eagle3 subset":
            return make_drafter("eagle3", target, draft_vocab_size=200)
        if family == "shipped":
            return checkpoint.load(target.name, target)
        if family == "foreign":
            folder = tmp_path_factory.mktemp("foreign")
            write_foreign(folder, target.tokenizer())
            return checkpoint.load(str(folder), target, foreign=True)
        # The target's own weights: nearly every draft is kept, so round ends depend on the draws.
        options = {"init": target.name} if family == "itself" else {}
        return make_drafter("draft-lm" if options else family, target, **options)

    return make


@pytest.fixture(scope="module")
def greedy(load: Callable[[str], Target]) -> Callable[[str], list[Greedy]]:
    """Of `prompts(8)`, by no cache and no engine."""
    return functools.cache(lambda arch: plain_greedy(load(arch), prompts(8), 24))


Drafters = Callable[..., ServingDrafter | None]


@pytest.mark.parametrize(
    "cell", [*CELLS, *(pytest.param(cell, marks=pytest.mark.long) for cell in LATER)], ids=str
)
def test_greedy_text_is_the_targets_alone(
    cell: Cell,
    load: Callable[[str], Target],
    greedy: Callable[[str], list[Greedy]],
    drafter_of: Drafters,
) -> None:
    """Pieces of prompts, preemption, other rows coming and going, rounds without drafts: text and
    the draft's own cache stay right; states of layers that cannot be rolled back, too. Trees are
    grown without an engine as well."""
    target, batch, expected = load(cell.arch), prompts(8), greedy(cell.arch)
    known = [prompt + tokens for prompt, (tokens, _) in zip(batch, expected)]
    drafter, is_tree = drafter_of(cell.family, target), "tree" in MODES[cell.mode]
    is_compared = cell.family in TRAINED and not is_tree and not target.state_layers
    compared = Compared(drafter, target) if is_compared else drafter
    used = compared and (TreeOracle(compared, known) if is_tree else Oracle(compared, known))
    config = EngineConfig(**((TREES if is_tree else CROWDED) | MODES[cell.mode]))
    engine = build_engine(target, used, config)
    completions = engine.generate(batch, GREEDY)
    for completion, right in zip(completions, expected):
        assert_same(completion.tokens, right)
    if is_tree:
        played = speculate_trees(
            TreeOracle(drafter, known), target, batch, shape=parse_tree(MODES[cell.mode]["tree"]),
            temperature=0.0, seeds=list(range(len(batch))), max_new_tokens=24,
        )  # fmt: skip
        for text, whole in zip(played.texts, known):
            assert text.tokens == whole[: len(text.tokens)]
        assert {one.accepted for text in played.texts for one in text.rounds} >= {0, 1, 2}
    # Every accepted count, or this would say little about caches.
    seen = {accepted for completion in completions for accepted in completion.speculation.accepted}
    if used is not None:
        assert seen >= ({0, 1, 2} if is_tree else {0, 1, 2, 3})
        assert engine.scheduler.num_preemptions > 0
    assert not engine.stats.fallbacks
    assert engine.scheduler.blocks.num_free == engine.scheduler.blocks.num_usable
    if is_compared:
        assert compared.compared > 20


PROMPTS = [[5, 60, 7, 200, 9, 33] * 4, [9, 8, 7], [40 + i % 11 for i in range(33)]]
SEEDS, TOKENS, K = [100, 101, 102], 18, 3
SEEDED = [
    Cell("none"), Cell("suffix"), Cell("eagle3"), Cell("medusa"), Cell("itself"), Cell("medusa", "choices"),
    Cell("mtp", "mixed"),
    *(
        pytest.param(cell, marks=pytest.mark.long)
        for cell in (
            Cell("dflash"), Cell("itself", "block"), Cell("eagle3", "dynamic"), Cell("eagle3", "sampled"),
            Cell("eagle3", arch="lfm2"),
        )
    ),
]  # fmt: skip


def submitted(engine: EngineCore, temperature: float) -> list[Request]:
    params = SamplingParams(temperature=temperature, max_tokens=TOKENS)
    return [
        engine.submit(prompt, replace(params, seed=seed)) for prompt, seed in zip(PROMPTS, SEEDS)
    ]


def config_of(cell: Cell, **options: Any) -> EngineConfig:
    return EngineConfig(**({"k": K, "compile": "off"} | MODES[cell.mode] | options))


def speculated(
    cell: Cell, target: Target, drafter: ServingDrafter, temperature: float
) -> list[SpeculatedText]:
    """By no engine. The first token of an answer is drawn without a draft: from there on the two
    see the same."""
    first = target.answer(PROMPTS, max_new_tokens=1, temperature=temperature, seeds=SEEDS)
    begun = [prompt + tokens for prompt, tokens in zip(PROMPTS, first)]
    options: dict[str, Any] = {
        "temperature": temperature, "seeds": SEEDS, "max_new_tokens": TOKENS - 1,
    }  # fmt: skip
    if (tree := MODES[cell.mode].get("tree")) is None:
        return speculate(drafter, target, begun, k=K, **options).texts
    if cell.mode == "mixed":
        tree = SAMPLED if temperature > 0 else DYNAMIC
    return speculate_trees(drafter, target, begun, shape=parse_tree(tree), **options).texts


def alone(
    cell: Cell, target: Target, drafter: ServingDrafter | None, temperature: float
) -> list[list[int]]:
    """Answers of requests that nobody shares the engine with."""
    engine = build_engine(target, drafter, config_of(cell, max_batch=1))
    requests = submitted(engine, temperature)
    finish(engine)
    found = [request.output for request in requests]
    if drafter is None:
        assert found == target.answer(
            PROMPTS, max_new_tokens=TOKENS, temperature=temperature, seeds=SEEDS
        )
    elif cell.mode != "block":  # which `speculate` does not have
        texts = speculated(cell, target, drafter, temperature)
        assert [one + own for one, own in zip(PROMPTS, found)] == [text.tokens for text in texts]
        for text, request in zip(texts, requests):
            rounds = [one for one in text.rounds if one.drafted]
            told = request.speculation
            assert [one.committed for one in rounds] == told.committed
            assert [min(one.accepted, one.committed) for one in rounds] == told.accepted
    return found


class Counted:
    """Calls of a function, and of those how many it decided."""

    def __init__(self, function: Callable[..., Any]):
        self.function, self.calls, self.decided = function, 0, 0

    def __call__(self, *arguments: Any) -> Any:
        found = self.function(*arguments)
        self.calls += 1
        self.decided += found is not None
        return found


@pytest.mark.parametrize("cell", SEEDED, ids=str)
def test_sampled_text_is_that_of_speculate_whatever_happens_around_it(
    cell: Cell, load: Callable[[str], Target], drafter_of: Drafters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preemption, pieces, other rows, passes that are captured, rounds without the compiled
    kernels: whatever is left behind in caches, the draft's included, would show, since the tokens
    depend on their drafts. Greedy requests beside them, where they have trees of their own."""
    target = load(cell.arch)
    drafter = drafter_of(cell.family, target)
    temperatures = (0.9, 0.0) if cell.family == "itself" or cell.mode == "mixed" else (0.9,)
    expected = [text for one in temperatures for text in alone(cell, target, drafter, one)]
    verified, drawn = (Counted(chain.verify_logits_compiled), Counted(draw_module.draw_compiled))
    for compiled, chunk, seed in ((True, 17, 2), (False, 16, 3)):
        kernels = (verified, drawn) if compiled else (lambda *_: None,) * 2
        monkeypatch.setattr(chain, "verify_logits_compiled", kernels[0])
        monkeypatch.setattr(draw_module, "draw_compiled", kernels[1])
        options = {"compile": "off" if compiled else "auto", "prefix_cache": compiled}
        engine = build_engine(
            target,
            drafter,
            config_of(cell, max_batch=4, block_size=8, max_round_tokens=chunk, **options),
        )
        for k in (0, None):
            engine.submit([50 + seed] * 9, SamplingParams(max_tokens=12, k=k, ignore_eos=True))
        requests = [request for one in temperatures for request in submitted(engine, one)]
        finish(engine, functools.partial(preempt, engine, random.Random(seed)))
        assert [request.output for request in requests] == expected
        assert sum(request.num_preemptions for request in requests) > 0
        assert not engine.stats.fallbacks
    if _kernel() is not None and drafter is not None and cell.mode == "chain":
        assert verified.decided >= 0.9 * verified.calls > 8
        assert (drawn.decided > 0) == (cell.family != "suffix")


def preempt(engine: EngineCore, random: random.Random) -> None:
    if engine.scheduler.running and random.random() < 0.4:
        engine.scheduler.preempt(engine.scheduler.running[-1])
