"""LoRA adapters by name: every request's text is that of transformers and peft alone, whoever
shares its pass."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.lm.draft_lm import DraftLm
from draftsmith.drafters.options import DraftLmOptions, Eagle3Options
from draftsmith.drafters.target.adapters import Adapters
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.text.suffix import Suffix
from draftsmith.errors import UserError
from draftsmith.serve.config import EngineConfig, ServeConfig
from draftsmith.serve.config_checks import check
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.engine import EngineCore
from draftsmith.serve.requests.request import Request, RequestOptions
from draftsmith.serve.sampling.params import SamplingParams
from tests.conftest import Records, save_adapter
from tests.integration.served import by_transformers

CAPTURED = True
PROMPT = [*range(40, 75), 9]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)
CONFIG = EngineConfig(k=3, max_batch=4, num_blocks=64, block_size=8)
NAMES = ["", "sql", "prose"]


@pytest.fixture(scope="module")
def folders(target_folder, tmp_path_factory) -> dict[str, str]:
    root: Path = tmp_path_factory.mktemp("adapters")
    target = target_folder
    return {
        "sql": save_adapter(target, root / "sql", seed=1),
        "prose": save_adapter(
            target, root / "prose", seed=2, use_rslora=True, target_modules=["q_proj", "k_proj", "o_proj", "gate_proj"],
            rank_pattern={"k_proj": 2}, layers_to_transform=[1, 3],
        ),
    }  # fmt: skip


def test_adapters_do_not_keep_a_target_in_memory(target_folder, folders) -> None:
    target = Target.load(target_folder)
    adapters = Adapters.load(target, folders)
    alive = weakref.ref(target.model)
    gc.collect()
    gc.disable()
    try:
        del target, adapters
        assert alive() is None
    finally:
        gc.enable()


@pytest.fixture(scope="module")
def alone(target_folder, folders) -> dict[str, tuple[list[int], list[float]]]:
    """Greedy tokens and their logprobs by adapter, of transformers and peft without us."""
    found = {}
    for name in NAMES:
        model = AutoModelForCausalLM.from_pretrained(target_folder).eval()
        if name:
            model = PeftModel.from_pretrained(model, folders[name]).eval()
        found[name] = by_transformers(model, PROMPT, GREEDY.max_tokens or 0)
    return found


@pytest.fixture(scope="module")
def adapted(target_folder, folders) -> tuple[Target, Adapters]:
    target = Target.load(target_folder, dtype=torch.float32)
    return target, Adapters.load(target, folders)


def answers(engine: EngineCore, names: list[str]) -> list[Request]:
    requests = [engine.submit(PROMPT, GREEDY, options=RequestOptions(adapter=one)) for one in names]
    while engine.busy:
        engine.step()
    return requests


@pytest.mark.parametrize("family", ["none", "eagle3"])
def test_text_is_that_of_peft_alone_in_any_batch(adapted, alone, family):
    target, adapters = adapted
    drafter = {
        "none": lambda: None,
        "eagle3": lambda: Eagle3.create(Eagle3Options(), target, seed=1).eval(),
    }[family]()
    assert len({tuple(tokens) for tokens, _ in alone.values()}) == 3
    engine = build_engine(target, drafter, CONFIG, adapters=adapters)
    # One prompt for all: what one adapter left in the prefix cache is none of another's.
    for batch in (["sql"], ["", "sql", "prose", ""], ["prose", "sql"], [""]):
        for name, request in zip(batch, answers(engine, batch), strict=True):
            tokens, logprobs = alone[name]
            assert request.output == tokens
            found = [one.logprob for one in request.logprobs]
            torch.testing.assert_close(found, logprobs, atol=1e-4, rtol=1e-4)
    assert engine.stats.prefix_cache_hits > 0
    assert not any(engine.stats.fallbacks.values())


def test_the_model_stays_the_base(target_folder, adapted):
    target, _ = adapted
    plain = Target.load(target_folder, dtype=torch.float32)
    assert target.revision == plain.revision
    assert [*target.model.state_dict()] == [*plain.model.state_dict()]
    ids = torch.tensor([PROMPT])
    mine, theirs = (one.states(ids, torch.ones_like(ids), ())[1] for one in (target, plain))
    assert torch.equal(mine, theirs)


def test_learning_has_the_base_alone_and_acceptance_is_counted_by_adapter(adapted):
    target, adapters = adapted
    drafter = Suffix()
    engine = build_engine(target, drafter, CONFIG, adapters=adapters, sink=Records())
    requests = answers(engine, ["", "sql", "prose"])
    engine.committer.flush()
    assert [request.options.acceptance_class for request in requests] == [
        "",
        "lora:sql",
        "lora:prose",
    ]
    assert [request.recording.num_records > 0 for request in requests] == [True, False, False]


def test_the_api_lists_and_chooses_adapters(adapted, live_server, alone):
    target, adapters = adapted
    server = live_server(target, Suffix(), CONFIG, adapters=adapters)
    models = server.http.get("/v1/models").json()["data"]
    assert [(one["id"], one["parent"]) for one in models] == [
        ("tiny", None), ("sql", "tiny"), ("prose", "tiny"),
    ]  # fmt: skip
    assert server.http.get("/v1/models/sql").json()["id"] == "sql"
    asked = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    for name in NAMES:
        body = server.told("/v1/completions", **asked, model=name or "tiny", return_token_ids=True)
        assert body["model"] == (name or "tiny")
        assert body["choices"][0]["token_ids"] == alone[name][0]
    refused = server.http.post("/v1/completions", json={**asked, "model": "absent"})
    assert refused.status_code == 404 and "'sql'" in refused.json()["error"]["message"]
    classes = server.http.get("/metrics").text
    assert (
        'draftsmith_class_draft_tokens_total{model_name="tiny",request_class="lora:sql"}' in classes
    )


def test_an_adapter_folder_as_target_is_merged_into_its_base(folders, alone, tmp_path):
    target = Target.load(folders["sql"], dtype=torch.float32)
    (request,) = answers(build_engine(target, None, replace(CONFIG, compile="off")), [""])
    assert request.output == alone["sql"][0]
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="names no base_model_name_or_path"):
        Target.load(tmp_path)


@pytest.mark.parametrize(
    ("options", "tied"),
    [
        ({"target_modules": ["lm_head", "q_proj"]}, True),
        ({"target_modules": ["embed_tokens", "q_proj"]}, True),
        ({"target_modules": ["lm_head", "embed_tokens"]}, False),
        ({"modules_to_save": ["embed_tokens"]}, True),
        ({"modules_to_save": ["lm_head"]}, True),
        ({"modules_to_save": ["embed_tokens", "lm_head"]}, False),
    ],
    ids=str,
)
def test_an_adapter_of_a_table_changes_that_table_alone(options, tied, target_folder, tmp_path):
    """Of a target with one table for embeddings and head, too; peft's own logits are the
    reference."""
    base = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
    if tied:
        base.config.tie_word_embeddings = True
        base.tie_weights()
    base.save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(target_folder).save_pretrained(tmp_path / "base")
    folder = save_adapter(str(tmp_path / "base"), tmp_path / "adapter", seed=1, **options)
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    for name, own in weights.items():
        if "lora_" not in name:  # of modules_to_save, which begin as the base's
            own += 0.02 * torch.randn(own.shape, generator=torch.Generator().manual_seed(len(name)))
    save_file(weights, tmp_path / "adapter" / "adapter_model.safetensors", {"format": "pt"})
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    ids = torch.tensor([PROMPT])
    before = again(ids).logits.detach()
    expected = PeftModel.from_pretrained(again, folder)(ids).logits
    spread = float(expected.std())
    assert float((expected - before).abs().max()) > 0.01 * spread
    target = Target.load(folder, dtype=torch.float32)
    assert float((target.model(ids).logits - expected).abs().max()) < 1e-4 * spread
    # A draft that begins as it, saved and read again.
    draft = DraftLm.create(DraftLmOptions(init=folder), target, seed=0)
    draft.save(tmp_path / "draft")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "draft", dtype=torch.float32)
    assert float((saved(ids).logits - expected).abs().max()) < 1e-4 * spread


def test_options_are_refused_in_one_sentence(adapted):
    with pytest.raises(UserError, match="the target's own name"):
        check(ServeConfig(target="t", name="a", lora=("a=b",)))
    target, adapters = adapted
    with pytest.raises(UserError, match=r"'absent' is not served here .*lora=\['absent"):
        build_engine(target, None, CONFIG, adapters=adapters).submit(
            PROMPT, GREEDY, options=RequestOptions(adapter="absent")
        )
