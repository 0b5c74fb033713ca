"""Draft language models: new ones, existing ones, adapters, and vocabularies that differ."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.drafters import checkpoint
from draftsmith.drafters.lm.draft_lm import DraftLm
from draftsmith.drafters.options import DraftLmOptions, LoraOptions
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from tests.unrolled import unroll_batch


def logits(drafter: DraftLm, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return drafter.lm.head(drafter.lm.full(ids).final)


IDS = torch.tensor([[5, 9, 200, 31, 77]])


def test_new_model_follows_its_options(target):
    options = DraftLmOptions(
        num_layers=3,
        hidden_size=24,
        intermediate_size=40,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    config = DraftLm.create(options, target, seed=0).model.config
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (3, 24, 40)
    assert (config.num_attention_heads, config.num_key_value_heads, config.vocab_size) == (
        4,
        2,
        288,
    )
    assert config.eos_token_id == 0 and config.max_position_embeddings == target.max_positions


def test_impossible_shape(target):
    for hidden, reason in (
        (20, "heads of head_dim=5"),
        (22, "a multiple of the 4 attention heads"),
    ):
        with pytest.raises(UserError, match=reason):
            DraftLm.create(
                DraftLmOptions(hidden_size=hidden, num_attention_heads=4), target, seed=0
            )
    few = DraftLmOptions(hidden_size=32, num_attention_heads=4, num_key_value_heads=3)
    with pytest.raises(UserError, match="num_attention_heads=4 with num_key_value_heads=3"):
        DraftLm.create(few, target, seed=0)


def test_saved_folder_is_a_plain_model(target, tmp_path):
    drafter = DraftLm.create(DraftLmOptions(), target, seed=0)
    checkpoint.save(drafter, tmp_path, target)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(plain(IDS).logits, logits(drafter, IDS))


@pytest.mark.parametrize("arch", ["llama", "qwen3", "qwen3_moe", "gpt2"])
def test_an_existing_model_is_taken_as_it_is(target, tiny_target, tmp_path, arch):
    """Mixture-of-experts weights have other names in memory than on disk; a saved draft must be
    loadable all the same."""
    folder = tiny_target(arch, seed=1)
    drafter = DraftLm.create(DraftLmOptions(init=folder), target, seed=0)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(IDS).logits
    torch.testing.assert_close(logits(drafter, IDS), expected, atol=1e-4, rtol=1e-4)
    checkpoint.save(drafter, tmp_path, target)
    torch.testing.assert_close(
        logits(checkpoint.load(tmp_path, target), IDS), expected, atol=1e-4, rtol=1e-4
    )


def test_a_saved_draft_is_where_the_next_training_starts(target, tmp_path):
    """It holds no tokenizer; its ids are the target's."""
    drafter = DraftLm.create(DraftLmOptions(), target, seed=0)
    checkpoint.save(drafter, tmp_path, target)
    further = DraftLm.create(DraftLmOptions(init=str(tmp_path)), target, seed=1)
    torch.testing.assert_close(logits(further, IDS), logits(drafter, IDS))


def test_a_folder_without_a_record_is_a_draft_lm(target, tiny_target):
    assert checkpoint.load(tiny_target("qwen3"), target).family == "draft-lm"


def test_adapters_train_alone_and_merge_exactly(target, tiny_target, tmp_path):
    options = DraftLmOptions(init=tiny_target("llama", seed=1), lora=LoraOptions(rank=4, alpha=8.0))
    drafter = DraftLm.create(options, target, seed=0)
    trained = [name for name, parameter in drafter.named_parameters() if parameter.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    untouched = logits(drafter, IDS)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.2)
    adapted = logits(drafter, IDS)
    assert (adapted - untouched).abs().max() > 0.1
    checkpoint.save(drafter, tmp_path, target)
    torch.testing.assert_close(
        logits(checkpoint.load(tmp_path, target), IDS), adapted, atol=1e-4, rtol=1e-4
    )
    torch.testing.assert_close(logits(drafter, IDS), adapted, msg="saving changed the draft")


def test_adapters_need_a_model(target):
    with pytest.raises(UserError, match=r"give draft\.init too"):
        DraftLm.create(DraftLmOptions(lora=LoraOptions()), target, seed=0)


@pytest.mark.parametrize("rows", [320, 272])
def test_padded_tables_are_matched(target, tiny_target, tmp_path, rows):
    """The same tokenizer with a table of another size; ids beyond it are never used."""
    folder = tiny_target("llama", seed=1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain = model(IDS).logits
    model.resize_token_embeddings(rows, mean_resizing=False)
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    drafter = checkpoint.load(tmp_path, target)
    assert drafter.lm.vocab_size == drafter.head_weight().shape[0] == 288
    common = min(rows, 288)
    torch.testing.assert_close(logits(drafter, IDS)[..., :common], plain[..., :common])


def test_another_tokenizer_is_refused_with_the_difference(target, tiny_target):
    with pytest.raises(
        UserError,
        match=r"288 tokens and the draft's 272 differ in 16, by their ids '.*' is 272 and unknown",
    ):
        DraftLm.create(DraftLmOptions(init=tiny_target("other_vocab")), target, seed=0)
    with pytest.raises(UserError, match="the draft's tokenizer is not the target's"):
        checkpoint.load(tiny_target("other_vocab"), target)


def test_a_soft_capped_head_is_served_but_not_trained(target, tiny_target):
    drafter = checkpoint.load(tiny_target("gemma2"), target)
    with pytest.raises(UserError, match="can be served but not trained"):
        drafter.head_weight()


def test_cached_positions(target):
    drafter = DraftLm.create(DraftLmOptions(), target, seed=0)
    # After position 9, four were drafted and the first three of them read: 10, 11, 12.
    assert [drafter.cached_after(9, 4, accepted) for accepted in range(5)] == [10, 11, 12, 13, 13]
    assert drafter.cached_after(9, 0, 0) == 10


# Cut out of a target


def unrolled(drafter: DraftLm, target: Target, ids: torch.Tensor) -> torch.Tensor:
    (step,) = drafter.unroll(unroll_batch(drafter, target, ids, 1))
    return step.hidden @ drafter.head_weight().T


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral", "gpt_neox", "mixtral"])
def test_all_layers_are_the_target_and_fewer_are_not(tiny_target, architecture):
    target = Target.load(tiny_target(architecture))
    ids = torch.arange(5, 17)[None]
    _, hidden = target.states(ids, torch.ones_like(ids), ())
    everything = tuple(range(target.num_layers))
    whole = DraftLm.create(DraftLmOptions(target_layers=everything), target, seed=0)
    torch.testing.assert_close(
        unrolled(whole, target, ids), target.head(hidden), rtol=1e-5, atol=1e-5
    )
    part = DraftLm.create(DraftLmOptions(target_layers=everything[:1]), target, seed=0)
    assert part.lm.num_layers == 1
    assert (unrolled(part, target, ids) - target.head(hidden)).abs().max() > 1e-3


def test_training_the_draft_leaves_the_target_alone(tiny_target):
    target = Target.load(tiny_target("llama"))
    before = target.model.get_input_embeddings().weight.clone()
    drafter = DraftLm.create(DraftLmOptions(target_layers=(0,)), target, seed=0)
    assert all(parameter.requires_grad for parameter in drafter.parameters())
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.zero_()
    torch.testing.assert_close(target.model.get_input_embeddings().weight, before)


@pytest.mark.parametrize("layers", [(), (1, 0), (0, 0), (-1,), (99,)])
def test_layers_that_are_not_there_are_refused(tiny_target, layers):
    with pytest.raises(UserError, match="target_layers"):
        DraftLm.create(
            DraftLmOptions(target_layers=layers), Target.load(tiny_target("llama")), seed=0
        )
