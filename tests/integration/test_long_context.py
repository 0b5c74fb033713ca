"""A text of 32,768 tokens through every part: serving in pieces with a prefix cache, every kind of
draft, and a head's training pass."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.interface import DraftInputs, Proposal, UnrollBatch
from draftsmith.drafters.lm.draft_lm import DraftLm
from draftsmith.drafters.options import DraftLmOptions, Eagle3Options
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.text.ngram import Ngram
from draftsmith.drafters.text.suffix import Suffix
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.sampling.params import SamplingParams
from tests.conftest import SHAPE, make_tokenizer

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

LENGTH, NUM_NEW, QUOTED = 32_768, 8, 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
CONFIG = EngineConfig(
    k=3, max_batch=2, num_blocks=2 * LENGTH // 64, block_size=64, max_round_tokens=2048,
    compile="off",
)  # fmt: skip


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> tuple[Target, list[int], list[int]]:
    """A tiny target, a prompt that ends with a quotation of its beginning, and the greedy answer of
    transformers."""
    shape = {
        **SHAPE, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": LENGTH,
    }  # fmt: skip
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **shape)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5)
    folder = tmp_path_factory.mktemp("long")
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    drawn = random.Random(0)
    text = [drawn.randrange(100, 288) for _ in range(LENGTH - NUM_NEW - QUOTED)]
    text[: 2 * QUOTED] = range(3, 3 + 2 * QUOTED)  # tokens that stand nowhere else
    prompt = text + text[:QUOTED]
    assert len(prompt) == LENGTH - NUM_NEW
    whole = model.generate(
        torch.tensor([prompt]), max_new_tokens=NUM_NEW, min_new_tokens=NUM_NEW, do_sample=False
    )
    return Target.load(folder, dtype=torch.float32), prompt, whole[0, len(prompt) :].tolist()


def served(drafter: Any, case: tuple[Target, list[int], list[int]]) -> list[list[int]]:
    """Drafted tokens of the first round of each of two equal requests."""
    target, prompt, answer = case
    first: list[list[int]] = []
    propose = drafter.propose

    def spy(inputs: DraftInputs) -> Proposal:
        proposal: Proposal = propose(inputs)
        if inputs.histories[0][:-1] == prompt:
            first.append(proposal.tokens[0, : int(proposal.lengths[0])].tolist())
        return proposal

    drafter.propose = spy
    engine = build_engine(target, drafter, CONFIG)
    for _ in range(2):
        (found,) = engine.generate([prompt], GREEDY)
        assert found.tokens == answer
    assert engine.stats.prefix_cache_hits > 0.99 * len(prompt)
    assert not any(engine.stats.fallbacks.values())
    return first


def test_text_drafts_see_all_of_it(case):
    _, prompt, _ = case
    quoted = prompt[QUOTED : QUOTED + 3]
    assert Ngram()._continuation("", prompt, 3) == quoted
    assert Suffix()._draft("", prompt, 3, False).tokens == quoted
    served(Ngram(min_n=1, max_n=4), case)


def test_a_head_reads_and_drafts_behind_all_of_it(case):
    drafter = Eagle3.create(Eagle3Options(), case[0], seed=1).eval()
    drafted = served(drafter, case)
    assert len(drafted) == 2 and all(drafted)


def test_a_head_is_unrolled_over_all_of_it(case):
    target, prompt, _ = case
    drafter = Eagle3.create(Eagle3Options(), target, seed=1).eval()
    ids = torch.tensor([prompt])
    taps, _ = target.states(ids, torch.ones_like(ids), drafter.taps)
    batch = UnrollBatch(input_ids=ids, attention_mask=torch.ones_like(ids), taps=taps, num_steps=1)
    with torch.no_grad():
        step = next(drafter.unroll(batch))
    assert step.hidden.shape[1] == len(prompt) and torch.isfinite(step.hidden).all()


def test_a_draft_lm_stops_at_its_own_positions(case):
    target, prompt, answer = case
    draft = DraftLm.create(DraftLmOptions(hidden_size=16, num_attention_heads=1), target, seed=1)
    draft.lm.config.max_position_embeddings = 4096
    ends: list[int] = []
    propose = draft.propose

    def spy(inputs: DraftInputs) -> Proposal:
        ends.append(int((inputs.starts + inputs.lengths + inputs.num_draft).max()))
        return propose(inputs)

    draft.propose = spy  # type: ignore[method-assign]
    engine = build_engine(target, draft.eval(), CONFIG)
    found, _ = engine.generate([prompt, prompt[:4090]], GREEDY)
    assert found.tokens == answer
    assert ends and max(ends) == 4096
