"""A target whose tables are padded far beyond its tokenizer, to 151,936 rows: drafts are trained,
judged, served and exported."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from draftsmith.drafters import checkpoint
from draftsmith.drafters.options import DraftOptions
from draftsmith.drafters.target.target import Target
from draftsmith.files import read_json
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.sampling.params import SamplingParams
from draftsmith.train.command import run
from draftsmith.train.config import EvalConfig, ExportConfig, OptimConfig, TrainConfig
from draftsmith.train.evaluate.command import run as evaluate
from draftsmith.train.export import command as export
from tests.data_folders import rows_of, write_rows

PADDED, OTHERWISE_PADDED = 151_936, 152_064
PROMPTS = [[5, 6, 7], [9, PADDED - 1, 31, 8]]
DRAFTS = {
    "eagle3": {},
    "eagle3 subset": {"draft": DraftOptions(draft_vocab_size=200)},
    "draft-lm": {"draft": DraftOptions(init="small")},
}


def save_model(folder: Path, tokenizer: str, *, vocab_size: int, seed: int) -> None:
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=16, intermediate_size=32, num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=None, eos_token_id=0,
        pad_token_id=1,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    known = len(AutoTokenizer.from_pretrained(tokenizer))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5)
        # As in trained models, ids that no text holds are unlikely; there are so many that some are
        # drawn all the same.
        model.lm_head.weight[:known] *= 3.0
        model.lm_head.weight[known:] *= 0.01
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)


@pytest.fixture(scope="module")
def workshop(tiny_target: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`target`, a smaller LM padded to another size, and `data`: the target's answers."""
    folder = tmp_path_factory.mktemp("padded")
    save_model(folder / "target", tiny_target("llama"), vocab_size=PADDED, seed=0)
    save_model(folder / "small", tiny_target("llama"), vocab_size=OTHERWISE_PADDED, seed=1)
    target = Target.load(folder / "target")
    prompts = PROMPTS * 4
    answers = target.answer(prompts, max_new_tokens=12, temperature=1.0, ignore_eos=True)
    write_rows(folder / "data", rows_of(prompts, answers))
    return folder


@pytest.mark.long
@pytest.mark.parametrize("name", DRAFTS)
def test_a_draft_over_a_padded_vocabulary(
    name: str, workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workshop)
    family, out = name.split()[0], name.replace(" ", "-")
    shared = {"target": "target", "data": "data", "batch_size": 4}
    config = TrainConfig(
        family=family, out=out, steps=8, log_every=4, held_out=0.0, dtype="float32",
        optim=OptimConfig(lr=1e-2),
        **shared, **DRAFTS[name],
    )  # fmt: skip
    run(config)
    first, *_, last = (
        json.loads(line) for line in (workshop / out / "metrics.jsonl").read_text().splitlines()
    )
    assert last["loss"] < first["loss"]

    evaluate(
        EvalConfig(
            draft=out, k=3, temperature=(1.0,), held_out=1.0, max_tokens=8, store=True, **shared
        )
    )
    (figures,) = read_json(workshop / out / "draftsmith.json")["evaluation"]
    assert 1.0 < figures["tau"]["value"] < 4.0

    target = Target.load(workshop / "target")
    drafter = checkpoint.load(workshop / out, target)
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    engine = build_engine(target, drafter, EngineConfig(k=3))
    found = engine.generate(PROMPTS, greedy)
    assert [one.tokens for one in found] == [
        one.tokens for one in build_engine(target, None, EngineConfig()).generate(PROMPTS, greedy)
    ]
    sampled = engine.generate(
        PROMPTS, SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    )
    assert all(0 <= token < PADDED for one in sampled for token in one.tokens)
    assert engine.stats.num_drafts > 0 and not engine.stats.fallbacks

    export.run(ExportConfig(draft=out, to="vllm", out=f"{out}-vllm", target="target"))
    assert read_json(workshop / f"{out}-vllm" / "config.json")["vocab_size"] == PADDED
