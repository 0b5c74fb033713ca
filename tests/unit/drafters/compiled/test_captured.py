"""A captured forward gives what the model gives: every state, logit, key and value, at any number
of tokens."""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import AutoModelForCausalLM

from draftsmith.drafters.compiled import captured as captured_module
from draftsmith.drafters.compiled.capture import NUM_TOKENS
from draftsmith.drafters.compiled.captured import Replay, capture_lm
from draftsmith.drafters.target.load import load_model
from draftsmith.drafters.target.target import FINAL, Target
from draftsmith.kernels.products.few_rows import few_rows
from tests.paged_texts import read_two

ARCHITECTURES = [
    "gemma2",
    "qwen3_moe",
    "llama4",
    *(
        pytest.param(arch, marks=pytest.mark.long)
        for arch in ("gpt_neox", "qwen3", "mistral", "gpt2")
    ),
]
TAPS = (2, 0, FINAL, 4)
# Tokens of the two rows in each pass: prompts, single tokens, verification of two depths, one row
# alone.
PASSES = [(9, 20), (1, 1), (4, 2), (1, 0), (0, 7), (3, 3)]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_family_is_captured_and_replayed_exactly(tiny_target, arch, monkeypatch):
    """Once: no number of tokens is captured anew."""
    own, captured = Target.load(tiny_target(arch)), Target.load(tiny_target(arch))
    capture_lm(captured)
    assert captured.captured
    monkeypatch.setattr(captured_module, "Replay", None)
    capture_lm(captured)
    found, expected = (read_two(one, PASSES, TAPS).everything for one in (captured, own))
    for one, other in zip(found, expected, strict=True):
        # Logits are a few units large; float32 sums in another order add up to 1e-5 of that.
        torch.testing.assert_close(one, other, atol=4e-5, rtol=1e-5)


def test_in_float64_only_the_order_of_sums_differs(tiny_target):
    own, captured = (Target.load(tiny_target("gemma2"), dtype=torch.float64) for _ in range(2))
    capture_lm(captured)
    found, expected = (read_two(one, PASSES, TAPS).outputs for one in (captured, own))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.taps, other.taps, atol=1e-13, rtol=1e-12)


def test_a_capture_that_is_wrong_is_not_used(tiny_target, monkeypatch, caplog):
    original = captured_module.Replay.__call__

    def wrong(self, *inputs, attention_context=None):
        result = original(self, *inputs, attention_context=attention_context)
        return result if isinstance(result, torch.Tensor) else [1.001 * state for state in result]

    monkeypatch.setattr(captured_module.Replay, "__call__", wrong)
    target = Target.load(tiny_target("llama"))
    with caplog.at_level(logging.INFO, logger="draftsmith.drafters.compiled.captured"):
        capture_lm(target)
    assert not target.captured
    assert "differs from the model's own" in caplog.text


def test_a_model_that_decides_by_value_is_run_as_it_is(tiny_target, monkeypatch, caplog):
    """Rotary frequencies that grow with the longest position are such a decision."""
    folder = tiny_target("llama")
    model = load_model(folder, trust_remote_code=False)
    config = model.config
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    growing = AutoModelForCausalLM.from_config(config).eval()
    target = Target(growing, "growing")
    with caplog.at_level(logging.INFO, logger="draftsmith.drafters.compiled.captured"):
        capture_lm(target)
    assert not target.captured
    assert "runs without a captured forward" in caplog.text
    read_two(target, PASSES)


@torch.no_grad()
def test_weights_written_in_place_count_after_a_refresh():
    layers = [torch.nn.Linear(16, size, bias=size > 8) for size in (8, 24)]

    def forward(rows, context):
        return [layer(rows) for layer in layers]

    replay = Replay(forward, [torch.zeros(1, NUM_TOKENS, 16)])
    rows = torch.randn(1, 3, 16)
    for layer in layers:
        layer.weight.copy_(torch.randn_like(layer.weight))
    stale = replay(rows)
    replay.refresh()
    for found, old, layer in zip(replay(rows), stale, layers):
        torch.testing.assert_close(found, layer(rows))
        assert (found - old).abs().max() > 0.1


@torch.no_grad()
def test_without_memory_for_a_second_copy_weights_stay_as_they_are(tiny_target):
    target = Target.load(tiny_target("llama"))
    layer = target.model.lm_head
    replay = Replay(
        lambda rows, context: layer(rows),
        [torch.zeros(1, NUM_TOKENS, target.hidden_size)],
        copies=0,
    )
    rows = torch.randn(1, 3, target.hidden_size)
    torch.testing.assert_close(replay(rows), layer(rows))
    assert [node.target for node in replay.graph.nodes if node.op == "call_function"] == [
        torch._C._nn.linear
    ]


@pytest.mark.skipif(few_rows(torch.ones(1, 2), None) is None, reason="there is no C++ compiler")
@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        ("llama", torch.bfloat16),
        ("qwen3", torch.float32),
        pytest.param("gemma", torch.bfloat16, marks=pytest.mark.long),
    ],
)
def test_verified_tokens_have_the_bits_of_tokens_decoded_one_by_one(
    tiny_target, architecture: str, dtype: torch.dtype
) -> None:
    target = Target.load(tiny_target(architecture), dtype=dtype)
    capture_lm(target)
    assert target.captured

    def verified(passes: list[tuple[int, int]]) -> torch.Tensor:
        read = read_two(target, passes)
        assert read.outputs[0].taps.dtype == dtype
        return read.of_row(0)[0][6:]

    alone = verified([(6, 0)] + [(1, 0)] * 24)
    with_others = [(6, 20), (4, 1), (8, 3), (1, 1), (3, 9), (8, 0)]
    assert torch.equal(verified(with_others), alone)
    # The control: the model's own forward rounds otherwise.
    with target.own_forward():
        assert not torch.equal(verified(with_others), alone)


@torch.no_grad()
@pytest.mark.parametrize("takes_two", [False, True])
def test_a_head_gives_its_products(takes_two):
    first, second = (torch.nn.Linear(16, 24, bias=False) for _ in range(2))

    def head(rows, context):
        return second(rows) - first(rows) if takes_two else first(rows)

    replay = Replay(head, [torch.zeros(1, NUM_TOKENS, 16)])
    rows = torch.randn(1, 3, 16)
    torch.testing.assert_close(replay(rows), head(rows, None))
