"""Served text does not depend on drafting: greedy text is the target's alone, a seeded request has
its tokens whatever happens around it, for every way to draft and verify."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from draftsmith.drafters.interface import DraftInputs, Proposal, ServingDrafter
from draftsmith.drafters.recurrent.kept import KeptState
from draftsmith.drafters.target import attention
from draftsmith.drafters.target.target import Target
from draftsmith.kernels.attention.pool import Chunk
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.engine import EngineCore
from draftsmith.serve.engine.scheduler import Schedule, ScheduledRow, Scheduler
from draftsmith.serve.requests.request import Request
from draftsmith.serve.sampling.params import SamplingParams
from tests.integration.served import (
    GREEDY,
    TEXT,
    TRAINED,
    Around,
    Greedy,
    Oracle,
    TreeOracle,
    assert_same,
    make_drafter,
    plain_greedy,
    prompts,
)

DYNAMIC, SAMPLED = "dynamic:nodes=12,depth=4,width=3", "sampled:3x2x1"
# Prompts come in pieces beside answers, and the latest request is put back again and again.
CROWDED: dict[str, Any] = {
    "k": 3, "max_batch": 3, "max_round_tokens": 11, "num_blocks": 14, "block_size": 8, "max_length": 80,
}  # fmt: skip
TREES: dict[str, Any] = {"max_batch": 5, "block_size": 8, "num_blocks": 18, "max_length": 80}


class Case(NamedTuple):
    """A target's architecture, what drafts for it, and what differs of the engine."""

    family: str
    arch: str = "llama"
    options: dict[str, Any] = {}  # noqa: RUF012


CASES = {
    **{family: Case(family) for family in (*TEXT, *TRAINED)},
    "a part of the vocabulary": Case("eagle3 subset"),
    "blocks": Case("draft-lm", options={"verification": "block"}),
    "not compiled": Case("eagle3", options={"compile": "off"}),
    "dynamic trees, windows": Case("eagle3", "mistral", {"tree": DYNAMIC}),
    "sampled trees, chunks": Case("eagle3", "llama4", {"tree": SAMPLED}),
    "trees of given choices": Case("medusa", options={"tree": "medusa"}),
    "8 bits, eagle3": Case("eagle3", "llama int8"),
    "8 bits, draft-lm": Case("draft-lm", "llama int8"),
}
ARCHITECTURES = ["qwen3", "mistral", "gemma", "gpt_neox", "qwen3_moe"]
LATER = {
    **{f"{family}, {arch}": Case(family, arch) for arch in ARCHITECTURES for family in ("ngram", "suffix", "eagle3", "mtp", "draft-lm")},
    "dynamic trees, soft caps": Case("mtp", "gemma2", {"tree": DYNAMIC}),
    "sampled trees, eagle1": Case("eagle1", options={"tree": SAMPLED}),
}  # fmt: skip


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


def drafter_of(case: Case, target: Target) -> ServingDrafter:
    if case.family == "eagle3 subset":
        return make_drafter("eagle3", target, draft_vocab_size=200)
    return make_drafter(case.family, target)


@pytest.fixture(scope="module")
def greedy(load: Callable[[str], Target]) -> Callable[[str], list[Greedy]]:
    """Of `prompts(8)`, by no cache and no engine."""
    return functools.cache(lambda arch: plain_greedy(load(arch), prompts(8), 24))


@pytest.mark.parametrize(
    "case",
    [*CASES.values(), *(pytest.param(case, marks=pytest.mark.long) for case in LATER.values())],
    ids=[*CASES, *LATER],
)
def test_greedy_text_is_the_targets_alone(
    case: Case, load: Callable[[str], Target], greedy: Callable[[str], list[Greedy]]
) -> None:
    """Pieces of prompts, preemption, other rows coming and going, rounds without drafts: text and
    the draft's own cache stay right."""
    target, batch, expected = load(case.arch), prompts(8), greedy(case.arch)
    known = [prompt + tokens for prompt, (tokens, _) in zip(batch, expected)]
    drafter, is_tree = drafter_of(case, target), "tree" in case.options
    if is_tree:
        used: Any = TreeOracle(drafter, known)
    else:
        compared = Compared(drafter, target) if case.family in TRAINED else drafter
        used = Oracle(compared, known)
    config = EngineConfig(**((TREES if is_tree else CROWDED) | case.options))
    engine = build_engine(target, used, config)
    completions = engine.generate(batch, GREEDY)
    for completion, right in zip(completions, expected):
        assert_same(completion.tokens, right)
    # Every accepted count, or this would say little about caches.
    seen = {accepted for completion in completions for accepted in completion.speculation.accepted}
    assert seen >= ({0, 1, 2} if is_tree else {0, 1, 2, 3})
    assert not engine.stats.fallbacks and engine.scheduler.num_preemptions > 0
    assert engine.scheduler.blocks.num_free == engine.scheduler.blocks.num_usable
    if not is_tree and case.family in TRAINED:
        assert compared.compared > 20


def test_greedy_text_without_drafts_is_the_targets_alone(
    load: Callable[[str], Target], greedy: Callable[[str], list[Greedy]]
) -> None:
    for arch in ("llama", "lfm2", "llama int8"):
        engine = build_engine(load(arch), None, EngineConfig(**CROWDED))
        for completion, right in zip(engine.generate(prompts(8), GREEDY), greedy(arch)):
            assert_same(completion.tokens, right)
    # The control: rounded, a target writes another text.
    assert greedy("llama") != greedy("llama int8")


RECURRENT = ["lfm2", "qwen3_next", "jamba"]
MORE_RECURRENT = [
    "lfm2_moe", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "granitemoehybrid", "bamba", "falcon_h1", "nemotron_h",
    "mamba", "mamba2", "falcon_mamba", "recurrent_gemma", "kimi_linear", "zamba2", "minimax",
]  # fmt: skip
SHORT = replace(GREEDY, max_tokens=16)
FEW_BLOCKS = EngineConfig(**(CROWDED | {"num_blocks": 9, "max_length": 64}))


@pytest.mark.parametrize(
    "arch", [*RECURRENT, *(pytest.param(arch, marks=pytest.mark.long) for arch in MORE_RECURRENT)]
)
def test_states_that_cannot_be_rolled_back_do_not_change_greedy_output(
    arch: str, load: Callable[[str], Target]
) -> None:
    target = load(arch)
    assert target.state_layers
    batch = prompts(5)
    expected = plain_greedy(target, batch, 16)
    known = [prompt + tokens for prompt, (tokens, _) in zip(batch, expected)]
    rounds = []
    for family in ("ngram", "eagle3"):
        engine = build_engine(target, Oracle(make_drafter(family, target), known), FEW_BLOCKS)
        for completion, right in zip(engine.generate(batch, SHORT), expected):
            assert_same(completion.tokens, right)
            rounds += zip(completion.speculation.offered, completion.speculation.accepted)
        assert not engine.stats.fallbacks and engine.scheduler.num_preemptions > 0
    # Everything was kept, or a part, which the round after reads again.
    assert {accepted for offered, accepted in rounds if offered == accepted} >= {1, 3}
    assert {accepted for offered, accepted in rounds if offered > accepted} >= {0, 1, 2}


def test_a_state_that_rejected_tokens_were_read_into_is_noticed(
    load: Callable[[str], Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control."""
    target, batch = load("lfm2"), prompts(3)
    expected = [tokens for tokens, _ in plain_greedy(target, batch, 16)]
    known = [prompt + tokens for prompt, tokens in zip(batch, expected)]

    def always_ahead(state: KeptState, left: int, drafted: int, accepted: int) -> None:
        state.side = 1 - state.side if drafted else state.side

    monkeypatch.setattr(KeptState, "verified", always_ahead)
    engine = build_engine(target, Oracle(make_drafter("ngram", target), known), FEW_BLOCKS)
    with pytest.raises((AssertionError, StopIteration)):
        answers = [completion.tokens for completion in engine.generate(batch, SHORT)]
        assert answers == expected


def transformers_greedy(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> Greedy:
    """`generate` of transformers, and the top-2 margin of every choice."""
    model.generation_config.eos_token_id = None
    answer = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=num_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(answer.logits).float().topk(2).values
    return answer.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist()


def chunked_texts(target: Target, folder: str) -> tuple[list[list[int]], list[Greedy]]:
    """Prompts of up to three chunks of 16 tokens, and their answers by transformers."""
    batch = prompts(8)
    batch.append([*batch[6][:35], 7, 8])  # shares two chunks with another
    own = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    expected = [transformers_greedy(own, prompt, 24) for prompt in batch]
    for (tokens, _), alone in zip(expected, plain_greedy(target, batch, 24), strict=True):
        assert_same(tokens, alone)
    return batch, expected


@pytest.mark.long
@pytest.mark.parametrize("family", ["ngram", "eagle3", "draft-lm"])
def test_chunks_of_attention_do_not_change_greedy_output(
    family: str, load: Callable[[str], Target], tiny_target: Callable[..., str]
) -> None:
    """Llama 4's, with scales of queries by position: drafts across the ends of chunks, blocks that
    other requests have read."""
    target = load("llama4")
    batch, expected = chunked_texts(target, tiny_target("llama4"))
    known = [prompt + tokens for prompt, (tokens, _) in zip(batch, expected)]
    drafter = Oracle(make_drafter(family, target), known)
    engine = build_engine(target, drafter, EngineConfig(**(CROWDED | {"k": 4})))
    seen, crossed = set(), 0
    for _ in range(2):
        for prompt, completion, right in zip(batch, engine.generate(batch, GREEDY), expected):
            assert_same(completion.tokens, right)
            begin = len(prompt)
            for accepted in completion.speculation.accepted:
                seen.add(accepted)
                crossed += begin // 16 < (begin + accepted) // 16
                begin += accepted + 1
    assert seen >= {0, 1, 2, 3, 4} and crossed > 5
    assert not engine.stats.fallbacks and engine.scheduler.num_preemptions > 0
    assert engine.stats.prefix_cache_hits > 32


@pytest.mark.long
@pytest.mark.parametrize("wrong", ["no chunks", "chunks of 17", "scales by place"])
def test_a_chunk_or_scale_that_is_wrong_is_noticed(
    wrong: str,
    load: Callable[[str], Target],
    tiny_target: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = load("llama4")
    batch, expected = chunked_texts(target, tiny_target("llama4"))
    if wrong == "scales by place":
        for module in target.model.modules():
            if "forward" in vars(module) and type(module).__name__ == "Llama4TextAttention":
                monkeypatch.delitem(vars(module), "forward")
    else:
        chunk = None if wrong == "no chunks" else Chunk(17)
        monkeypatch.setattr(attention, "chunk_of", lambda module: chunk)
    engine = build_engine(target, None, EngineConfig(compile="off"))
    with target.own_forward(), pytest.raises(AssertionError, match="instead of"):
        for completion, right in zip(engine.generate(batch, GREEDY), expected):
            assert_same(completion.tokens, right)


PROMPTS = [[5, 60, 7, 200, 9, 33] * 4, [9, 8, 7], [40 + i % 11 for i in range(33)]]
SEEDED = {
    "none": Case("none"),
    "ngram": Case("ngram"),
    "eagle3": Case("eagle3"),
    "medusa": Case("medusa"),
    "dflash": Case("dflash"),
    "itself": Case("itself"),
    "itself, by blocks": Case("itself", options={"verification": "block"}),
    "sampled trees": Case("eagle3", options={"tree": SAMPLED}),
    "dynamic trees": Case("eagle3", options={"tree": DYNAMIC}),
}


def seeded_drafter(case: Case, target: Target) -> ServingDrafter | None:
    if case.family == "none":
        return None
    # The target's own weights: nearly every draft is kept, so round ends depend on the draws.
    options = {"init": target.name} if case.family == "itself" else {}
    return make_drafter("draft-lm" if options else case.family, target, **options)


def submitted(engine: EngineCore, indices: list[int]) -> list[Request]:
    return [
        engine.submit(
            PROMPTS[index],
            SamplingParams(
                temperature=0.9, top_k=20, seed=100 + index, max_tokens=24, ignore_eos=True
            ),
        )
        for index in indices
    ]


def finish(
    engine: EngineCore, requests: list[Request], *, preempt: random.Random | None = None
) -> list[list[int]]:
    while engine.busy:
        engine.step()
        if preempt is not None and engine.scheduler.running and preempt.random() < 0.4:
            engine.scheduler.preempt(engine.scheduler.running[-1])
    return [request.output for request in requests]


def alone(target: Target, drafter: ServingDrafter | None, case: Case) -> list[list[int]]:
    outputs = []
    for index in range(len(PROMPTS)):
        config = EngineConfig(k=3, max_batch=1, compile="off", **case.options)
        engine = build_engine(target, drafter, config)
        outputs += finish(engine, submitted(engine, [index]))
    return outputs


@pytest.mark.parametrize("case", SEEDED.values(), ids=SEEDED)
def test_seeded_tokens_do_not_depend_on_preemption_chunking_or_rows(
    case: Case, load: Callable[[str], Target]
) -> None:
    """Whatever is left behind in caches, the draft's included, would show: the tokens depend on
    their drafts."""
    target = load("llama")
    drafter = seeded_drafter(case, target)
    expected = alone(target, drafter, case)
    for chunk, seed, cache in ((17, 2, True), (16, 3, False)):
        options = {"max_round_tokens": chunk, "prefix_cache": cache, **case.options}
        config = EngineConfig(k=3, max_batch=4, block_size=8, compile="off", **options)
        engine = build_engine(target, drafter, config)
        for k in (0, None):
            engine.submit([50 + seed] * 9, SamplingParams(max_tokens=12, k=k, ignore_eos=True))
        requests = submitted(engine, [0, 1, 2])
        assert finish(engine, requests, preempt=random.Random(seed)) == expected
        assert sum(request.num_preemptions for request in requests) > 0
        assert not engine.stats.fallbacks


def test_a_token_decided_while_refilling_would_be_noticed(
    load: Callable[[str], Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: without the rule that a refill decides nothing the same request goes on with
    other tokens."""

    def deciding(self: Scheduler, schedule: Schedule, request: Request, budget: int) -> int:
        computed = request.cache.computed
        row = ScheduledRow(request, computed, min(budget, request.num_tokens - computed))
        (schedule.sampling if row.samples else schedule.filling).append(row)
        return row.count

    target = load("llama")
    drafter = seeded_drafter(SEEDED["itself"], target)
    expected = alone(target, drafter, SEEDED["itself"])
    monkeypatch.setattr(Scheduler, "_piece", deciding)
    engine = build_engine(target, drafter, EngineConfig(k=3, max_batch=4, compile="off"))
    requests = submitted(engine, [0, 1, 2])
    assert finish(engine, requests, preempt=random.Random(1)) != expected
