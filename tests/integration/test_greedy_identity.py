"""Greedy output with speculation is greedy output without, for every drafter, architecture and
batch."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.heads.mtp import Mtp
from draftsmith.drafters.interface import DraftInputs, Proposal, ServingDrafter
from draftsmith.drafters.lm.draft_lm import DraftLm
from draftsmith.drafters.options import (
    OPTIONS,
    DraftLmOptions,
    Eagle3Options,
    MtpOptions,
    SuffixOptions,
)
from draftsmith.drafters.recurrent.kept import KeptState
from draftsmith.drafters.registry import FAMILIES as REGISTRY
from draftsmith.drafters.target import attention
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.text.ngram import Ngram
from draftsmith.drafters.text.suffix import Suffix
from draftsmith.drafters.text.text_first import TextFirst
from draftsmith.kernels.attention.window import Chunk
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.requests.request import Completion
from draftsmith.serve.sampling.params import SamplingParams

ARCHITECTURES = ["llama", "qwen3", "mistral", "gemma", "gpt_neox", "qwen3_moe"]
FAMILIES = ["ngram", "suffix", "eagle3", "mtp", "draft-lm"]
HEADS = ["p-eagle", "eagle1", "medusa", "mlp", "dflash", "dspark"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
# The largest gap of the two best logits that rounding in another batch shape could turn round.
NOISE = 1e-4


def make_drafter(
    family: str, target: Target, *, draft_vocab_size: int | None = None
) -> ServingDrafter:
    if family == "ngram":
        return Ngram(min_n=1, max_n=3)
    if family == "suffix":
        # Remembering the same answers from the engine before, it would be right too often for this
        # test.
        return Suffix(SuffixOptions(max_spec_offset=1.0, max_cached_requests=0))
    if family == "suffix and draft-lm":
        text = Suffix(SuffixOptions(max_spec_offset=1.0, max_cached_requests=0))
        return TextFirst(make_drafter("draft-lm", target), text, share=0.2)
    if family == "eagle3":
        counts = torch.arange(target.vocab_size).flip(0)
        drafter = Eagle3.create(
            Eagle3Options(draft_vocab_size=draft_vocab_size), target, seed=1, token_counts=counts
        )
    elif family == "mtp":
        drafter = Mtp.create(MtpOptions(), target, seed=1)
    elif family in HEADS:
        drafter = REGISTRY[family].create(OPTIONS[family](), target, seed=1)
    else:
        drafter = DraftLm.create(
            DraftLmOptions(hidden_size=16, num_attention_heads=2), target, seed=1
        )
    return drafter.to(device=target.device, dtype=target.dtype).eval()


class Oracle:
    """A real drafter whose drafts are overwritten with the target's own continuation for a while,
    so that every accepted count occurs however bad the untrained drafter is. What the drafter
    itself drafted stays as the rejected rest."""

    def __init__(self, drafter: ServingDrafter, known: list[list[int]]):
        self.drafter, self.known, self.random = drafter, known, random.Random(0)
        self.family, self.taps, self.new_pool = drafter.family, drafter.taps, drafter.new_pool

    def cached_after(self, last: int, drafted: int, accepted: int) -> int:
        # What the drafter read after the last token were its own drafts, not the ones put in their
        # place.
        return min(self.drafter.cached_after(last, drafted, accepted), last + 1)

    def propose(self, inputs: DraftInputs) -> Proposal:
        proposal = self.drafter.propose(inputs)
        tokens, lengths = proposal.tokens.clone(), proposal.lengths.clone()
        for row, history in enumerate(inputs.histories):
            text = next(text for text in self.known if text[: len(history)] == history)
            right = text[len(history) :][: self.random.randint(0, int(inputs.num_draft[row]))]
            tokens[row, : len(right)] = torch.tensor(right, dtype=torch.int64)
            lengths[row] = max(int(lengths[row]), len(right))
        return Proposal(tokens=tokens, lengths=lengths, logits=None)


class Compared:
    """Checks that every proposal from the incremental cache equals one computed from nothing."""

    def __init__(self, drafter: ServingDrafter, target: Target):
        self.drafter, self.target, self.compared = drafter, target, 0
        self.family, self.taps, self.new_pool = drafter.family, drafter.taps, drafter.new_pool
        self.cached_after = drafter.cached_after

    def propose(self, inputs: DraftInputs) -> Proposal:
        proposal = self.drafter.propose(inputs)
        for row, history in enumerate(inputs.histories):
            fresh = self.drafter.propose(self._fresh(inputs, row, history))
            length = int(proposal.lengths[row])
            assert fresh.lengths.tolist() == [length]
            assert fresh.tokens[0, :length].tolist() == proposal.tokens[row, :length].tolist()
            if proposal.logits is not None:
                assert_close_distributions(proposal.logits[row, :length], fresh.logits[0, :length])
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


def assert_close_distributions(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(
        torch.softmax(one, -1), torch.softmax(other, -1), atol=2e-4, rtol=1e-3
    )


@pytest.fixture(scope="module")
def load(tiny_target: Callable[..., str]) -> Callable[[str], Target]:
    loaded: dict[str, Target] = {}

    def get(arch: str) -> Target:
        if arch not in loaded:
            loaded[arch] = Target.load(tiny_target(arch))
        return loaded[arch]

    return get


def prompts(count: int, vocab_size: int = 288) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    sizes = [5, 17, 1, 30, 9, 16, 40, 2][:count]
    return [torch.randint(3, vocab_size, (size,), generator=generator).tolist() for size in sizes]


Greedy = tuple[list[int], list[float]]


def plain_greedy(target: Target, batch: list[list[int]], num_tokens: int) -> list[Greedy]:
    """Token by token with the whole texts each time: no cache, no engine. Each text is then read
    alone. Also the top-2 margin of every choice."""
    sizes = torch.tensor([len(prompt) for prompt in batch])
    width = int(sizes.max()) + num_tokens
    tokens = torch.zeros(len(batch), width, dtype=torch.int64)
    for row, prompt in enumerate(batch):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
    rows = torch.arange(len(batch))
    for step in range(num_tokens):
        mask = (torch.arange(width) < (sizes + step)[:, None]).float()
        longest = int(sizes.max()) + step
        _, hidden = target.states(tokens[:, :longest], mask[:, :longest], ())
        tokens[rows, sizes + step] = target.head(hidden[rows, sizes + step - 1]).argmax(-1)
    return [
        chosen_alone(target, tokens[row, : size + num_tokens], num_tokens)
        for row, size in enumerate(sizes.tolist())
    ]


def chosen_alone(target: Target, text: torch.Tensor, num_tokens: int) -> Greedy:
    """The last tokens of a text, which is read without padding and without other texts, and the
    top-2 margins of their choices."""
    _, hidden = target.states(text[None], torch.ones(1, len(text)), ())
    best = target.head(hidden[0, -num_tokens - 1 : -1]).float().topk(2)
    tokens, margins = text[-num_tokens:].tolist(), (best.values[:, 0] - best.values[:, 1]).tolist()
    assert_same(best.indices[:, 0].tolist(), (tokens, margins))
    return tokens, margins


def assert_same(tokens: list[int], expected: tuple[list[int], list[float]]) -> None:
    wanted, margins = expected
    for index, (token, right) in enumerate(zip(tokens, wanted, strict=True)):
        if token != right:
            assert margins[index] < NOISE, (
                f"token {index} is {token} instead of {right}, margin {margins[index]}"
            )
            return


def together_as_plain(
    target: Target, drafter: ServingDrafter, batch: list[list[int]], expected: list[Greedy]
) -> list[Completion]:
    """Answers of an engine that drafts for the whole batch, each the target's own."""
    engine = build_engine(target, drafter, EngineConfig(k=4, max_batch=8))
    together = engine.generate(batch, GREEDY)
    for completion, right in zip(together, expected):
        assert_same(completion.tokens, right)
    assert not engine.stats.fallbacks and engine.stats.num_draft_tokens > 0
    return together


@pytest.mark.parametrize(
    "arch",
    [ARCHITECTURES[0], *(pytest.param(arch, marks=pytest.mark.long) for arch in ARCHITECTURES[1:])],
)
def test_speculation_does_not_change_greedy_output(
    arch: str, load: Callable[[str], Target]
) -> None:
    target = load(arch)
    batch = prompts(8)
    expected = plain_greedy(target, batch, 24)
    known = [prompt + tokens for prompt, (tokens, _) in zip(batch, expected)]
    plain = build_engine(target, None, EngineConfig()).generate(batch, GREEDY)
    for completion, right in zip(plain, expected):
        assert_same(completion.tokens, right)
    for family in FAMILIES + ([*HEADS, "suffix and draft-lm"] if arch == "llama" else []):
        drafter = make_drafter(family, target)
        for used in (drafter, Oracle(drafter, known)):
            alone = build_engine(target, used, EngineConfig(k=3)).generate(batch[:1], GREEDY)
            assert_same(alone[0].tokens, expected[0])
            together = together_as_plain(target, used, batch, expected)
        # The oracle must have exercised every accepted count, or this test says little about
        # caches.
        seen = {accepted for completion in together for accepted in completion.speculation.accepted}
        assert seen >= {0, 1, 2, 3, 4}


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
    """Llama 4's, with scales of queries by position: drafts across the ends of chunks, prompts in
    pieces, preemption, blocks that other requests have read."""
    target = load("llama4")
    batch, expected = chunked_texts(target, tiny_target("llama4"))
    known = [prompt + tokens for prompt, (tokens, _) in zip(batch, expected)]
    drafter = Oracle(make_drafter(family, target), known)
    config = EngineConfig(
        k=4, max_batch=3, max_round_tokens=11, num_blocks=14, block_size=8, max_length=80
    )
    engine = build_engine(target, drafter, config)
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


@pytest.mark.parametrize("family", ["eagle3", "mtp", "draft-lm", *HEADS])
def test_incremental_drafts_equal_drafts_from_nothing(
    family: str, load: Callable[[str], Target]
) -> None:
    """Chunked prefill, preemption, other rows coming and going, k = 0 rounds: the draft's cache
    stays right."""
    target = load("llama")
    batch = prompts(6)
    expected = plain_greedy(target, batch, 24)
    known = [prompt + tokens for prompt, (tokens, _) in zip(batch, expected)]
    compared = Compared(make_drafter(family, target, draft_vocab_size=200), target)
    drafter = Oracle(compared, known)
    config = EngineConfig(
        k=3, max_batch=3, max_round_tokens=11, num_blocks=14, block_size=8, max_length=80
    )
    engine = build_engine(target, drafter, config)
    for completion, right in zip(engine.generate(batch, GREEDY), expected):
        assert_same(completion.tokens, right)
    assert not engine.stats.fallbacks
    assert engine.scheduler.num_preemptions > 0 and compared.compared > 20


RECURRENT = ["lfm2", "qwen3_next", "jamba"]
MORE_RECURRENT = [
    "lfm2_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "olmo_hybrid",
    "granitemoehybrid",
    "bamba",
    "falcon_h1",
    "nemotron_h",
    "mamba",
    "mamba2",
    "falcon_mamba",
    "recurrent_gemma",
    "kimi_linear",
    "zamba2",
    "minimax",
]
# Prompts come in pieces beside answers, and the latest request is put back again and again.
CROWDED = EngineConfig(
    k=3, max_batch=3, max_round_tokens=11, num_blocks=9, block_size=8, max_length=64
)
SHORT = replace(GREEDY, max_tokens=16)


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
    plain = build_engine(target, None, CROWDED).generate(batch, SHORT)
    for completion, right in zip(plain, expected):
        assert_same(completion.tokens, right)
    rounds = []
    for family in ("ngram", "eagle3"):
        engine = build_engine(target, Oracle(make_drafter(family, target), known), CROWDED)
        for completion, right in zip(engine.generate(batch, SHORT), expected):
            assert_same(completion.tokens, right)
            rounds += zip(completion.speculation.offered, completion.speculation.accepted)
        assert not engine.stats.fallbacks and engine.scheduler.num_preemptions > 0
    # Everything was kept, or a part, which the round after reads again.
    assert {accepted for offered, accepted in rounds if offered == accepted} >= {1, 3}
    assert {accepted for offered, accepted in rounds if offered > accepted} >= {0, 1, 2}


@pytest.mark.parametrize("arch", RECURRENT[:1])
def test_a_state_that_rejected_tokens_were_read_into_is_noticed(
    arch: str, load: Callable[[str], Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load(arch)
    batch = prompts(3)
    expected = [tokens for tokens, _ in plain_greedy(target, batch, 16)]
    known = [prompt + tokens for prompt, tokens in zip(batch, expected)]

    def always_ahead(state: KeptState, left: int, drafted: int, accepted: int) -> None:
        state.side = 1 - state.side if drafted else state.side

    monkeypatch.setattr(KeptState, "verified", always_ahead)
    engine = build_engine(target, Oracle(make_drafter("ngram", target), known), CROWDED)
    with pytest.raises((AssertionError, StopIteration)):
        answers = [completion.tokens for completion in engine.generate(batch, SHORT)]
        assert answers == expected
