"""LongRoPE and dynamic RoPE, whose frequencies follow the longest position of a pass: fixed by the
served length, refused where a text would depend on its batch, on chunks of its prompt or on drafts,
and the same in all of these where they are served."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from draftsmith.drafters.target import causal_lm
from draftsmith.drafters.target.load import load_tokenizer
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.serve.bench.command import check as check_bench
from draftsmith.serve.bench.command import server_arguments
from draftsmith.serve.bench.config import BenchConfig
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.sampling.params import SamplingParams
from draftsmith.train.check.models import check_target
from draftsmith.train.config import EvalConfig, TrainConfig
from draftsmith.train.evaluate.command import run as evaluate
from draftsmith.train.session import load_corpus
from tests.integration.served import NOISE, by_transformers
from tests.noise import spread
from tests.stand_in_drafts import Junk

CAPTURED, OFF = True, EngineConfig(compile="off")
ORIGINAL, LONGEST, VOCAB_SIZE = 32, 256, 288
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
LONG_ROPE: dict[str, Any] = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4,
    "long_factor": [4.0, 3.0, 2.0, 2.0],
    "original_max_position_embeddings": ORIGINAL,
}  # fmt: skip
TARGETS: dict[str, dict[str, Any]] = {
    "longrope": {
        "model_type": "phi3", "max_position_embeddings": LONGEST, "rope_parameters": LONG_ROPE,
        "original_max_position_embeddings": ORIGINAL,
    },
    "dynamic": {
        "model_type": "llama", "max_position_embeddings": ORIGINAL,
        "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
    },
}  # fmt: skip


@pytest.fixture
def load(tmp_path: Path, target_folder: str) -> Callable[..., Target]:
    def get(name: str, max_length: int | None = None) -> Target:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**SHAPE, **TARGETS[name]}))
        spread(model).save_pretrained(tmp_path / name)
        load_tokenizer(target_folder, trust_remote_code=False).save_pretrained(tmp_path / name)
        return Target.load(tmp_path / name, dtype=torch.float32, max_length=max_length)

    return get


def prompts(*sizes: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB_SIZE, (size,), generator=generator).tolist() for size in sizes]


def answers(
    target: Target, texts: list[list[int]], count: int, drafter: Any = None, **options: Any
) -> list[list[int]]:
    config = EngineConfig(**{"k": 8, "prefix_cache": False, "compile": "off", **options})
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    return [
        completion.tokens
        for completion in build_engine(target, drafter, config).generate(texts, params)
    ]


def ways(
    target: Target, texts: list[list[int]], count: int, **options: Any
) -> Iterator[tuple[str, list[list[int]]]]:
    """The same greedy answers by every way that a request may take through the engine."""
    yield "alone", [answers(target, [text], count, **options)[0] for text in texts]
    yield "together", answers(target, texts, count, **options)
    yield "in chunks", answers(target, texts, count, **options, max_round_tokens=5)
    yield "with drafts", answers(target, texts, count, Junk(), **options)
    yield (
        "alone with drafts",
        [answers(target, [text], count, Junk(), **options)[0] for text in texts],
    )


def differ(target: Target, prompt: list[int], answer: list[int], expected: list[int]) -> bool:
    """Whether they part at a token that was no tie within rounding."""
    for at, (token, right) in enumerate(zip(answer, expected, strict=True)):
        if token != right:
            ids = torch.tensor([prompt + expected[:at]])
            best = (
                target.head(target.states(ids, torch.ones_like(ids), ())[1][0, -1]).topk(2).values
            )
            return float(best[0] - best[1]) > NOISE
    return False


@pytest.mark.parametrize(("name", "compile"), [("longrope", "auto"), ("dynamic", "off")])
def test_the_same_text_every_way_up_to_the_original_length(name, compile, load):
    target, texts = load(name), prompts(3, 20, 24, 11)
    expected = [target.answer([text], max_new_tokens=8, ignore_eos=True)[0] for text in texts]
    for way, found in ways(target, texts, 8, compile=compile, max_length=ORIGINAL):
        for text, answer, right in zip(texts, found, expected, strict=True):
            assert not differ(target, text, answer, right), f"{way}: {answer} in place of {right}"


@pytest.mark.long
@pytest.mark.parametrize("compile", ["off", "auto"])
def test_the_same_text_every_way_beyond_the_original_length(compile, load, tmp_path):
    """Short texts, long ones and some that cross, against transformers with the long factors under
    the name of the short ones too."""
    target, texts = load("longrope", LONGEST), prompts(3, 20, 60, 120, 28)
    assert target.max_positions == LONGEST
    long = AutoConfig.from_pretrained(tmp_path / "longrope")
    long.rope_parameters["short_factor"] = long.rope_parameters["long_factor"]
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "longrope", config=long).eval()
    expected = [by_transformers(alone, text, 12)[0] for text in texts]
    for way, found in ways(target, texts, 12, compile=compile, max_length=LONGEST):
        for text, answer, right in zip(texts, found, expected, strict=True):
            assert not differ(target, text, answer, right), f"{way}: {answer} in place of {right}"
    together = target.answer(texts, max_new_tokens=12, ignore_eos=True)
    for text, answer, right in zip(texts, together, expected, strict=True):
        assert not differ(target, text, answer, right)


def test_rows_of_a_training_batch_are_rotated_alike_beyond_the_original_length(load):
    target = load("longrope", ORIGINAL + 1)
    short, long = prompts(9, 60)
    rows = torch.tensor([short + [0] * 51, long])
    mask = torch.arange(60) < torch.tensor([[9], [60]])
    padded = target.states(rows, mask.long(), ())[1][0, :9]
    packed = target.states(
        torch.tensor([long + short]), torch.ones(1, 69, dtype=torch.int64), (),
        torch.tensor([[0] * 60 + [1] * 9]),
    )[1][0, 60:]  # fmt: skip
    alone = target.states(rows[:1, :9], mask[:1, :9].long(), ())[1][0]
    torch.testing.assert_close(padded, alone, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)


def test_records_and_stored_states_of_other_factors_are_of_another_revision(load):
    short, long = load("longrope", ORIGINAL), load("longrope", LONGEST)
    assert load("longrope").revision == short.revision != long.revision


def test_nothing_beyond_the_original_length_is_served_unless_it_is_loaded_so(load):
    target = load("longrope")
    assert target.max_positions == ORIGINAL
    with pytest.raises(UserError, match=r"'longrope'.*longest one.*give --max-length 32"):
        build_engine(target, None, OFF)
    with pytest.raises(UserError, match=r"max_length is 33: .*'longrope'.*make it at most 32"):
        build_engine(target, None, replace(OFF, max_length=ORIGINAL + 1))
    engine = build_engine(target, None, replace(OFF, max_length=ORIGINAL))
    with pytest.raises(UserError, match="context 32"):
        engine.generate(prompts(ORIGINAL), SamplingParams(max_tokens=1))


def test_dynamic_rope_is_served_up_to_the_length_of_its_configuration(load):
    """Beyond, transformers would follow the longest position of the pass; up to it, it does not."""
    target = load("dynamic")
    assert build_engine(target, None, OFF).max_length == target.max_positions == ORIGINAL
    with pytest.raises(UserError, match=r"max_length is 33: .*'dynamic'"):
        build_engine(target, None, replace(OFF, max_length=ORIGINAL + 1))


def test_batches_of_training_and_of_answers_stay_below_the_original_length(load):
    target = load("longrope")
    ids = torch.zeros(2, ORIGINAL + 1, dtype=torch.int64)
    for segments in (None, torch.zeros_like(ids)):
        with pytest.raises(UserError, match="longest text of the batch, in tokens, is 33"):
            target.states(ids, torch.ones_like(ids), (), segments)
    packed = (torch.arange(ORIGINAL + 1) > 8).long().expand(2, -1)
    target.states(ids, torch.ones_like(ids), (), packed)
    with pytest.raises(UserError, match="the longest prompt and its answer, in tokens, is 33"):
        target.answer(prompts(3, ORIGINAL - 7), max_new_tokens=8)
    target.answer(prompts(3, ORIGINAL - 8), max_new_tokens=8)


def test_commands_that_read_texts_are_held_to_the_original_length(load):
    target = load("longrope")
    told = {"target": target.name, "data": "no such data", "max_length": ORIGINAL + 1}
    with pytest.raises(UserError, match=r"option 'max_length' is 33: .*'longrope'"):
        load_corpus(TrainConfig(family="eagle3", out="no such draft", **told), target)
    with pytest.raises(UserError, match="no such draft"):  # the target is loaded for 33 tokens
        evaluate(EvalConfig(draft="no such draft", **told))
    (finding,) = (finding for finding in check_target(target) if finding.check == "target.rope")
    assert finding.status == "warn" and "right for up to 32 of its 256 positions" in finding.what
    assert not [
        finding for finding in check_target(load("dynamic")) if finding.check == "target.rope"
    ]
    arguments = server_arguments(BenchConfig(target=target.name, max_length=ORIGINAL))
    assert arguments[arguments.index("--max-length") + 1] == str(ORIGINAL)
    with pytest.raises(UserError, match="max_length is for a server started here"):
        check_bench(BenchConfig(url="x", max_length=ORIGINAL))


def test_the_probe_alone_refuses_it_under_any_name(load, monkeypatch):
    monkeypatch.setattr(causal_lm, "rope_limit", lambda config: None)
    with pytest.raises(UserError, match="depend on which others share its pass"):
        load("longrope")
