"""DFlash and DSpark: their published formulas slot by slot, blocks that see all of themselves, and
what is refused."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.drafters import checkpoint
from draftsmith.drafters.blocks.dflash import Dflash
from draftsmith.drafters.init_from_target import output_table
from draftsmith.drafters.interface import Proposal, UnrollBatch
from draftsmith.drafters.options import DflashOptions, DsparkOptions
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.kernels.sampling.filters import SamplingRows, process
from tests.first_rounds import first_round
from tests.noise import noisy

OPTIONS = {
    ("dflash", True): DflashOptions(block_size=5),
    ("dflash", False): DflashOptions(block_size=5, causal=False),
    ("dspark", True): DsparkOptions(block_size=4, markov_rank=6),
    ("dspark", False): DsparkOptions(block_size=4, markov_rank=6, causal=False),
}
K = 4


@pytest.fixture(scope="module")
def target(tiny_target) -> Target:
    return Target.load(tiny_target("llama"), dtype=torch.float64)


@pytest.fixture(
    scope="module", params=OPTIONS, ids=lambda kind: f"{kind[0]} {'causal' if kind[1] else 'whole'}"
)
def drafter(request, target) -> Dflash:
    made = FAMILIES[request.param[0]].create(OPTIONS[request.param], target, seed=0)
    made = made.to(device=target.device, dtype=torch.float64)
    return noisy(made, 2)


def rms(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + 1e-6)


def rotated(states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[T, heads, D]."""
    width = states.shape[-1]
    angles = positions[:, None].double() * 10000.0 ** (
        -torch.arange(0, width, 2, dtype=torch.float64) / width
    )
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = states.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def block_states(drafter: Dflash, target: Target, text: list[int], slots: int) -> torch.Tensor:
    """[slots, H] normed states of the block after `text`, from the weights alone, with one dense
    attention a layer."""
    weights, config = drafter.state_dict(), drafter.config
    heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    taps, _ = target.states(torch.tensor([text]), torch.ones(1, len(text)), drafter.taps)
    context = rms(taps[0, :-1] @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    newest = len(text) - 1
    before, block = torch.arange(newest), newest + torch.arange(slots)
    states = target.embed(torch.tensor([text[-1]] + [drafter.shape.mask_token] * (slots - 1)))
    for layer in range(config.num_hidden_layers):
        part = {
            name.removeprefix(f"layers.{layer}."): tensor
            for name, tensor in weights.items()
            if f"layers.{layer}." in name
        }
        inner = rms(states, part["input_layernorm.weight"])

        def project(
            name: str, rows: torch.Tensor, count: int, part: dict[str, torch.Tensor] = part
        ) -> torch.Tensor:
            return (rows @ part[f"self_attn.{name}_proj.weight"].T).view(len(rows), count, width)

        query = rotated(rms(project("q", inner, heads), part["self_attn.q_norm.weight"]), block)
        both = torch.cat([context, inner])
        key = rotated(
            rms(project("k", both, kv_heads), part["self_attn.k_norm.weight"]),
            torch.cat([before, block]),
        )
        value = project("v", both, kv_heads).repeat_interleave(heads // kv_heads, dim=1)
        scores = torch.einsum(
            "qhd,khd->hqk", query, key.repeat_interleave(heads // kv_heads, dim=1)
        ) / math.sqrt(width)
        if drafter.shape.causal:
            scores = scores.masked_fill(
                torch.cat([before, block])[None, None] > block[None, :, None], -torch.inf
            )
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)
        states = states + attended @ part["self_attn.o_proj.weight"].T
        inner = rms(states, part["post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(inner @ part["mlp.gate_proj.weight"].T)
        states = (
            states
            + (gate * (inner @ part["mlp.up_proj.weight"].T)) @ part["mlp.down_proj.weight"].T
        )
    return rms(states, weights["norm.weight"])


def propose(drafter: Dflash, target: Target, text: list[int], k: int) -> Proposal:
    return drafter.propose(first_round(drafter, target, [text], [k]))


@torch.no_grad()
def test_drafts_follow_the_published_formula(drafter, target):
    text = torch.randint(3, 288, (13,), generator=torch.Generator().manual_seed(1)).tolist()
    proposal = propose(drafter, target, text, K)
    assert proposal.lengths.tolist() == [K]
    drafted = proposal.tokens[0].tolist()
    skipped = 0 if drafter.family == "dspark" else 1
    states = block_states(drafter, target, text, K + skipped)
    for depth in range(K):
        logits = output_table(target) @ states[depth + skipped]
        if drafter.family == "dspark":
            markov = drafter.markov_head
            previous = [text[-1], *drafted][depth]
            correction = markov.markov_w2.weight @ markov.markov_w1.weight[previous]
            assert correction.abs().max() > 0.1
            logits = logits + correction
        distribution = process(logits[None], SamplingRows.of([1.0]))[0].softmax(-1)
        torch.testing.assert_close(
            proposal.logits[0, depth].softmax(-1), distribution, atol=1e-5, rtol=1e-4
        )


@torch.no_grad()
def test_a_whole_block_is_unrolled_as_it_is_drafted(drafter, target):
    """With as many steps as are drafted: a slot of a block that is not causal depends on how many
    there are."""
    text = torch.randint(3, 288, (10,), generator=torch.Generator().manual_seed(4)).tolist()
    for k in (2, K):
        proposal = propose(drafter, target, text, k)
        whole = torch.tensor([[*text, *proposal.tokens[0].tolist()]])
        taps, _ = target.states(whole, torch.ones_like(whole), drafter.taps)
        batch = UnrollBatch(
            input_ids=whole, attention_mask=torch.ones_like(whole), taps=taps, num_steps=k
        )
        for depth, step in enumerate(drafter.unroll(batch)):
            column = len(text) - 2 + depth
            assert bool(step.valid[0, column])
            distribution = (step.hidden[0, column] @ drafter.head_weight().T).softmax(-1)
            torch.testing.assert_close(
                proposal.logits[0, depth].double().softmax(-1), distribution, atol=1e-5, rtol=1e-4
            )
    distributions = [propose(drafter, target, text, k).logits[0, 0].softmax(-1) for k in (1, K)]
    difference = float((distributions[0] - distributions[1]).abs().max())
    assert (difference < 1e-6) == drafter.shape.causal


@torch.no_grad()
def test_no_more_is_drafted_than_a_block_holds(drafter, target):
    assert propose(drafter, target, [5, 6, 7, 8], 7).lengths.tolist() == [drafter.max_depth] == [4]
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])
    taps, _ = target.states(ids, torch.ones_like(ids), drafter.taps)
    steps = drafter.unroll(
        UnrollBatch(input_ids=ids, attention_mask=torch.ones_like(ids), taps=taps, num_steps=6)
    )
    assert [bool(step.valid.any()) for step in steps] == [True] * 4 + [False] * 2


@pytest.fixture
def folder(target, tmp_path):
    checkpoint.save(Dflash.create(DflashOptions(), target, seed=0), tmp_path, target)
    (tmp_path / "draftsmith.json").unlink()
    return tmp_path


def reconfigure(folder, nested: dict | None = None, **values) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= values
    config["dflash_config"] |= nested or {}
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if value is not None})
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"nested": {"sample_from_anchor": True}}, "sample_from_anchor=True"),
        ({"nested": {"use_swa": True}}, "sliding_window=None"),
        (
            {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 2},
            "sliding_window=2",
        ),
        ({"nested": {"attention_sink_bias": True}}, "attention_sink_bias=True"),
        ({"block_size": None}, "'block_size'"),
        ({"nested": {"target_layer_ids": [0, 9]}}, "tap 10 does not exist"),
        ({"vocab_size": 300}, "vocab_size=300 where 32 and 288"),
        ({"num_hidden_layers": 3}, "'layers.2.self_attn.q_proj.weight' is missing"),
    ],
)
def test_what_cannot_be_served_is_refused(change, words, folder, target):
    reconfigure(folder, **change)
    with pytest.raises(UserError, match=words.replace("[", r"\[")):
        checkpoint.load(folder, target)


def test_a_reduced_vocabulary_needs_its_map(folder, target):
    tensors = load_file(folder / "model.safetensors")
    tensors |= {"lm_head.weight": torch.zeros(100, 32)}
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match="head over 100 tokens"):
        checkpoint.load(folder, target)
    reconfigure(folder, draft_vocab_size=100)
    with pytest.raises(UserError, match="head over 100 tokens"):
        checkpoint.load(folder, target)
    save_file({**tensors, "d2t": torch.full((100,), 200)}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"d2t of .* does not map"):
        checkpoint.load(folder, target)


def test_blocks_of_others_are_not_causal_unless_they_say_so(folder, target):
    config = json.loads((folder / "config.json").read_text())
    del config["dflash_config"]["causal"]
    (folder / "config.json").write_text(json.dumps(config))
    assert not checkpoint.load(folder, target).shape.causal


def test_the_mask_token_is_one_that_no_text_holds(target):
    assert target.tokenizer().convert_tokens_to_ids("<|mask|>") == 2
    assert Dflash.create(DflashOptions(mask_token=2), target, seed=0).shape.mask_token == 2
    with pytest.raises(UserError, match="'mask_token' is 288"):
        Dflash.create(DflashOptions(mask_token=288), target, seed=0)
