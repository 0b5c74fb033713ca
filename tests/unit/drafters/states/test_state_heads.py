"""Medusa and the MLP speculator: their published formulas, their public layouts, and depths that
are not there."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.drafters import checkpoint
from draftsmith.drafters.init_from_target import output_table
from draftsmith.drafters.interface import Proposal, UnrollBatch
from draftsmith.drafters.layouts.folder import DraftFolder
from draftsmith.drafters.options import MedusaOptions, MlpOptions
from draftsmith.drafters.registry import FAMILIES, family_of
from draftsmith.drafters.states.medusa import Medusa
from draftsmith.drafters.states.mlp import Mlp
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.kernels.sampling.filters import SamplingRows
from tests.first_rounds import first_round

HEADS, LAYERS = 3, 2


def noise(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * shape[-1] ** -0.5


def draft_greedily(drafter, target: Target, text: list[int], k: int) -> Proposal:
    greedy = SamplingRows.of([0.0])
    return drafter.propose(first_round(drafter, target, [text], [k], sampling=greedy))


def final_state(target: Target, text: list[int]) -> torch.Tensor:
    """[H], what the head multiplied to choose the last token of `text`."""
    ids = torch.tensor([text])
    return target.states(ids, torch.ones_like(ids), ())[1][0, -2]


def medusa_files(
    folder: Path, target: Target, *, original: bool, tables: bool
) -> dict[str, torch.Tensor]:
    """A Medusa draft as others write it; returns the tensors under the original names."""
    size, vocab = target.hidden_size, target.vocab_size
    tensors = {}
    for head in range(HEADS):
        for layer in range(LAYERS):
            tensors[f"{head}.{layer}.linear.weight"] = noise((size, size), 10 * head + layer)
            tensors[f"{head}.{layer}.linear.bias"] = noise((size,), 100 + 10 * head + layer)
        if tables:
            tensors[f"{head}.{LAYERS}.weight"] = noise((vocab, size), 1000 + head)
    if original:
        config = {
            "medusa_num_heads": HEADS,
            "medusa_num_layers": LAYERS,
            "base_model_name_or_path": "somewhere",
        }
        save_file(tensors, folder / "medusa_lm_head.safetensors")
    else:
        config = {
            "model_type": "medusa", "num_heads": HEADS, "num_hidden_layers": LAYERS,
            "hidden_size": size, "vocab_size": vocab,
            "truncated_vocab_size": vocab, "medusa_fc_bias": True, "original_lm_head": not tables,
        }  # fmt: skip
        named = {}
        for name, tensor in tensors.items():
            head, layer, *rest = name.split(".")
            named[
                f"blocks.{head}.layers.{layer}.{rest[-1]}"
                if len(rest) == 2
                else f"lm_heads.{head}.weight"
            ] = tensor
        if not tables:
            named["lm_head.weight"] = output_table(target).detach().clone()
        save_file(named, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


@torch.no_grad()
@pytest.mark.parametrize(("original", "tables"), [(True, True), (False, True), (False, False)])
def test_medusa_made_elsewhere_drafts_by_the_published_formula(original, tables, target, tmp_path):
    tensors = medusa_files(tmp_path, target, original=original, tables=tables)
    drafter = checkpoint.load(tmp_path, target)
    assert isinstance(drafter, Medusa) and bool(len(drafter.tables)) == tables
    text = [5, 9, 40, 7, 30]
    expected = []
    for head in range(HEADS):
        state = final_state(target, text)
        for layer in range(LAYERS):
            linear = (
                tensors[f"{head}.{layer}.linear.weight"] @ state
                + tensors[f"{head}.{layer}.linear.bias"]
            )
            state = state + linear * torch.sigmoid(linear)
        table = tensors[f"{head}.{LAYERS}.weight"] if tables else output_table(target)
        expected.append(int((table @ state).argmax()))
    assert draft_greedily(drafter, target, text, HEADS).tokens[0].tolist() == expected
    checkpoint.save(drafter, tmp_path / "again", target)
    again = checkpoint.load(tmp_path / "again", target)
    assert all(
        torch.equal(tensor, again.state_dict()[name])
        for name, tensor in drafter.state_dict().items()
    )


def mlp_files(
    folder: Path, target: Target, *, tied: bool, copies: bool, scale_input: bool, inner: int = 24
) -> dict[str, torch.Tensor]:
    """An MLP speculator as IBM writes it; returns every depth's tensors."""
    size, vocab = target.hidden_size, target.vocab_size
    tensors = {}
    for depth in range(HEADS):
        first = 0 if tied else depth
        tensors[f"emb.{depth}.weight"] = noise((vocab, inner), 1 + first)
        tensors[f"proj.{depth}.weight"] = noise(
            (inner, size if depth == 0 else inner), 20 + (min(depth, 1) if tied else depth)
        )
        tensors[f"ln.{depth}.weight"] = 1 + noise((inner,), 40 + first)
        tensors[f"ln.{depth}.bias"] = noise((inner,), 60 + first)
        tensors[f"head.{depth}.weight"] = noise((vocab, inner), 80 + first)
    written = tensors
    if tied and not copies:
        written = {
            name: tensor
            for name, tensor in tensors.items()
            if ".0." in name or name.startswith("proj.1")
        }
    save_file(
        {f"speculator.{name}": tensor.clone() for name, tensor in written.items()},
        folder / "model.safetensors",
    )
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator",
        "vocab_size": vocab, "emb_dim": size,
        "inner_dim": inner, "n_predict": HEADS, "n_candidates": 5,
        "top_k_tokens_per_head": [5, 4, 3], "tie_weights": tied,
        "scale_input": scale_input,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


@torch.no_grad()
@pytest.mark.parametrize(
    ("tied", "copies", "scale_input"),
    [(True, True, True), (True, False, False), (False, False, True)],
)
def test_an_mlp_speculator_made_elsewhere_drafts_by_the_published_formula(
    tied, copies, scale_input, target, tmp_path
):
    tensors = mlp_files(tmp_path, target, tied=tied, copies=copies, scale_input=scale_input)
    drafter = checkpoint.load(tmp_path, target)
    assert isinstance(drafter, Mlp)
    text = [5, 9, 40, 7, 30]
    state, token, expected = final_state(target, text), text[-1], []
    if scale_input:
        state = state / torch.sqrt(state.pow(2).mean() + 1e-6) / math.sqrt(2)
    state_weight = 0.5 ** (0.5 / HEADS)
    emb_weight = math.sqrt((1 - state_weight**2) * (24 / 2))
    for depth in range(HEADS):
        mixed = (
            tensors[f"proj.{depth}.weight"] @ state
            + emb_weight / state_weight * tensors[f"emb.{depth}.weight"][token]
        )
        mixed = mixed / torch.sqrt(mixed.pow(2).mean() + 1e-6)
        state = torch.nn.functional.gelu(
            tensors[f"ln.{depth}.weight"] * mixed + tensors[f"ln.{depth}.bias"]
        )
        token = int((tensors[f"head.{depth}.weight"] @ state).argmax())
        expected.append(token)
    assert draft_greedily(drafter, target, text, HEADS).tokens[0].tolist() == expected
    checkpoint.save(drafter, tmp_path / "again", target)
    again = checkpoint.load(tmp_path / "again", target)
    assert all(
        torch.equal(tensor, again.state_dict()[name])
        for name, tensor in drafter.state_dict().items()
    )


def test_a_tied_copy_that_differs_is_refused(target, tmp_path):
    mlp_files(tmp_path, target, tied=True, copies=True, scale_input=False)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["speculator.emb.2.weight"][0, 0] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"'emb.2.weight' .* has no place"):
        checkpoint.load(tmp_path, target)


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "options"),
    [("medusa", MedusaOptions(num_heads=2)), ("mlp", MlpOptions(num_predict=2))],
)
def test_depths_beyond_the_last_are_neither_drafted_nor_scored(family, options, target):
    drafter = FAMILIES[family].create(options, target, seed=0)
    proposal = draft_greedily(drafter, target, [5, 6, 7, 8], 4)
    assert proposal.lengths.tolist() == [2] and proposal.tokens[0, 2:].tolist() == [-1, -1]
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    taps, _ = target.states(ids, torch.ones_like(ids), drafter.taps)
    steps = list(
        drafter.unroll(
            UnrollBatch(input_ids=ids, attention_mask=torch.ones_like(ids), taps=taps, num_steps=4)
        )
    )
    assert [bool(step.valid.any()) for step in steps] == [True, True, False, False]


@torch.no_grad()
def test_a_new_medusa_says_what_the_target_says(target):
    """Its blocks start at zero: every head repeats the target's own next token."""
    drafter = Medusa.create(MedusaOptions(num_heads=2, num_layers=2), target, seed=0)
    text = [5, 9, 40, 7, 30]
    said = int(target.head(final_state(target, text)).argmax())
    assert draft_greedily(drafter, target, text, 2).tokens[0, 0] == said


@pytest.mark.parametrize(
    ("config", "family"),
    [
        ({"medusa_num_heads": 3}, "medusa"),
        ({"model_type": "medusa", "architectures": ["MedusaModel"]}, "medusa"),
        ({"model_type": "mlp_speculator"}, "mlp"),
        ({"architectures": ["EagleLlamaForCausalLM"], "model_type": "llama"}, "eagle1"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}, "eagle3"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "mask_token_id": 5}, "p-eagle"),
        ({"architectures": ["PEagleDraftModel"]}, "p-eagle"),
        ({"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}, "mtp"),
        ({"model_type": "glm4_moe", "num_nextn_predict_layers": 1}, "mtp"),
        ({"model_type": "glm4_moe", "num_nextn_predict_layers": 0}, "draft-lm"),
        ({"architectures": ["DFlashDraftModel"]}, "dflash"),
        ({"architectures": ["Qwen3DSparkModel"]}, "dspark"),
        ({"model_type": "llama"}, "draft-lm"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "draft-lm"),
    ],
)
def test_families_are_known_by_their_configuration(config, family, tmp_path):
    assert family_of(DraftFolder(tmp_path, config)) == family


@pytest.mark.parametrize("wrong", [{"vocab_size": 7}, {"hidden_size": 7}, {"num_heads": 0}])
def test_medusa_for_another_target_is_refused(wrong, target, tmp_path):
    medusa_files(tmp_path, target, original=False, tables=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | wrong))
    with pytest.raises(UserError, match=f"{next(iter(wrong))}|heads and layers"):
        checkpoint.load(tmp_path, target)


@pytest.mark.parametrize("wrong", [{"vocab_size": 7}, {"emb_dim": 7}, {"n_predict": 0}])
def test_an_mlp_speculator_for_another_target_is_refused(wrong, target, tmp_path):
    mlp_files(tmp_path, target, tied=True, copies=True, scale_input=False)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | wrong))
    with pytest.raises(UserError, match=next(iter(wrong))):
        checkpoint.load(tmp_path, target)
