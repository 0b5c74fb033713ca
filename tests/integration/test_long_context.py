"""A text of 32,768 tokens through every part: serving in pieces with a prefix cache, every family,
HTTP with records, evaluation and a training step."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from draftsmith.distill.buffer.record_table import from_table, to_table
from draftsmith.distill.buffer.traffic import stitch
from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.interface import DraftInputs, Proposal
from draftsmith.drafters.options import OPTIONS, Eagle3Options
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.text.suffix import Suffix
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.sampling.params import SamplingParams
from draftsmith.train.data.batches import collate
from draftsmith.train.data.dataset import TokenSequence
from draftsmith.train.evaluate.teacher_forced import DraftRule, count_documents, summarise
from draftsmith.train.objective.teacher import LiveSource
from draftsmith.train.objective.unrolled_loss import unrolled_loss
from tests.conftest import SHAPE, make_tokenizer
from tests.first_rounds import text_round
from tests.noise import spread

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

LENGTH, NUM_NEW, QUOTED = 32_768, 8, 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
CONFIG = EngineConfig(
    k=3, max_batch=2, num_blocks=2 * LENGTH // 64 + 2, block_size=64, max_round_tokens=2048,
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
    folder = tmp_path_factory.mktemp("long")
    spread(model).save_pretrained(folder)
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
    asked = text_round([prompt], [3], request_ids=["r"], shares=[False])
    assert Suffix().propose(asked).tokens[0].tolist() == quoted
    served(Suffix(), case)


@pytest.mark.parametrize("family", ["eagle3", "dflash", "draft-lm"])
def test_families_of_each_kind_draft_behind_all_of_it(family, case):
    small = {"hidden_size": 16, "num_attention_heads": 1} if family == "draft-lm" else {}
    drafter = FAMILIES[family].create(OPTIONS[family](**small), case[0], seed=1).eval()
    drafted = served(drafter, case)
    assert len(drafted) == 2 and all(drafted)


def test_the_api_answers_and_records_all_of_it(case, live_server, records):
    target, prompt, answer = case
    drafter = Eagle3.create(Eagle3Options(), target, seed=1).eval()
    server = live_server(target, drafter, CONFIG, sink=records)
    server.http.timeout = 600
    asked = {"temperature": 0, "max_tokens": NUM_NEW, "ignore_eos": True, "return_token_ids": True}
    found = server.complete(prompt, **asked).json()
    assert found["choices"][0]["token_ids"] == answer
    assert found["usage"]["prompt_tokens"] == len(prompt)
    text = stitch(from_table(to_table(list(records))))
    assert text is not None and text.tokens == prompt + answer


def test_evaluated_and_trained_at_the_end_of_all_of_it(case):
    target, prompt, answer = case
    text = torch.tensor(prompt + answer)
    sequence = TokenSequence("0", text, torch.arange(len(text)) >= len(prompt))
    drafter = Eagle3.create(Eagle3Options(), target, seed=1)
    rule = DraftRule(1.0, 2)
    found = summarise(count_documents(drafter.eval(), target, [sequence], rule), rule)
    assert 1 <= found.tau.value <= 3
    loss = unrolled_loss(drafter, LiveSource(target), collate([sequence]), num_steps=2, decay=0.8)
    loss.total.backward()
    for parameter in drafter.parameters():
        if parameter.requires_grad:
            assert torch.isfinite(parameter.grad).all() and parameter.grad.abs().max() > 0
