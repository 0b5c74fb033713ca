"""The target wrapper equals the model it wraps: paged against plain eager forward, taps, head,
batched answers."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from draftsmith.drafters.target.load import load_model
from draftsmith.drafters.target.target import FINAL, Target
from draftsmith.errors import UserError
from draftsmith.kernels.attention.paged import PagedPass
from tests.paged_texts import read_two

ARCHITECTURES = [
    "llama",
    "qwen3",
    "mistral",
    "gemma",
    "gemma2",
    "gpt_neox",
    "qwen3_moe",
    "mixtral",
    "gpt2",
]
LENGTHS = (23, 17)
# Logits are a few units large and leave `forward` in float32; the float32 models of `pair` add up
# to 2e-5.
CLOSE = {"atol": 4e-5, "rtol": 1e-5, "check_dtype": False}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def pair(request, tiny_target):
    """Our target and the same weights under transformers' eager attention."""
    folder = tiny_target(request.param)
    # float64 leaves only mistakes, but transformers' grouped expert product has no such kernel.
    dtype = torch.float32 if request.param in ("qwen3_moe", "mixtral") else torch.float64
    eager = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    ).eval()
    return Target.load(folder, dtype=dtype), eager


def texts(target: Target) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, target.vocab_size, (size,), generator=generator) for size in LENGTHS]


@torch.no_grad()
def test_paged_forward_in_odd_chunks_is_the_plain_forward(pair):
    target, eager = pair
    counts = [(7, 2), (1, 5), (9, 0), (0, 9), (5, 1), (1, 0)]
    read = read_two(target, counts, (0, 1, 3, FINAL))
    for row, length in enumerate(LENGTHS):
        logits, states = read.of_row(row)
        expected = eager(
            read.texts[row : row + 1, :length], output_hidden_states=True, use_cache=False
        )
        torch.testing.assert_close(logits, expected.logits[0], **CLOSE)
        hidden = torch.cat([expected.hidden_states[k][0] for k in (0, 1, 3, -1)], dim=-1)
        torch.testing.assert_close(states, hidden, **CLOSE)


@torch.no_grad()
def test_a_pass_with_gradients_on_records_none(pair):
    with torch.enable_grad():
        (output,) = read_two(pair[0], [LENGTHS]).outputs
    assert not output.logits.requires_grad


def test_a_wrong_block_table_is_noticed(pair):
    """The comparison above can fail: the same pass with two blocks exchanged gives other logits."""
    target, eager = pair
    ids = texts(target)[0][:12]
    pool = target.new_pool(num_blocks=4, block_size=4)
    first, rest = torch.arange(8), torch.arange(8, 12)
    target.forward(
        ids[None, :8],
        first[None],
        PagedPass(pool, torch.tensor([[0, 1, 2]]), first, torch.tensor([8])),
        first,
    )
    context = PagedPass(pool, torch.tensor([[0, 3, 2]]), rest, torch.tensor([4]))
    logits = target.forward(ids[None, 8:], rest[None], context, torch.arange(4)).logits
    assert (logits - eager(ids[None]).logits[0, 8:]).abs().max() > 1e-2


@torch.no_grad()
def test_states_of_right_padded_texts(pair):
    target, eager = pair
    rows = texts(target)
    ids = torch.zeros(2, max(LENGTHS), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(rows):
        ids[row, : len(text)], mask[row, : len(text)] = text, 1
    taps, hidden = target.states(ids, mask, (2, target.num_layers, FINAL))
    for row, text in enumerate(rows):
        expected = eager(text[None], output_hidden_states=True, use_cache=False)
        size = target.hidden_size
        torch.testing.assert_close(
            taps[row, : len(text), :size], expected.hidden_states[2][0], **CLOSE
        )
        torch.testing.assert_close(
            taps[row, : len(text), 2 * size :], expected.hidden_states[-1][0], **CLOSE
        )
        torch.testing.assert_close(
            target.head(hidden[row, : len(text)]), expected.logits[0], **CLOSE
        )


@torch.no_grad()
def test_raw_last_tap_is_the_state_before_the_final_norm(tiny_target):
    target = Target.load(tiny_target("llama"))
    ids = texts(target)[0][None]
    taps, hidden = target.states(ids, torch.ones_like(ids), (target.num_layers,))
    torch.testing.assert_close(target.model.model.norm(taps), hidden)


def test_unknown_tap_is_refused(tiny_target):
    target = Target.load(tiny_target("llama"))
    ids = torch.tensor([[5, 6, 7]])
    with pytest.raises(UserError, match="tap 5 does not exist in a target of 4 layers"):
        target.states(ids, torch.ones_like(ids), (5,))


def test_left_padding_is_refused_by_states(tiny_target):
    target = Target.load(tiny_target("llama"))
    with pytest.raises(ValueError, match="pad texts on the right"):
        target.states(torch.tensor([[1, 5, 6]]), torch.tensor([[0, 1, 1]]), ())


def test_greedy_answers_do_not_depend_on_the_batch(pair):
    target, eager = pair
    prompts = [row[:length].tolist() for row, length in zip(texts(target), (9, 4))]
    together = target.answer(prompts, max_new_tokens=10)
    for prompt, answer in zip(prompts, together):
        ids = prompt
        for token in answer:
            with torch.no_grad():
                assert int(eager(torch.tensor([ids])).logits[0, -1].argmax()) == token
            ids = [*ids, token]
        assert len(answer) == 10 or answer[-1] in target.eos_token_ids


def test_the_checkpoints_generation_settings_change_no_distribution(tiny_target, tmp_path):
    """Some checkpoints ship a repetition penalty; the target's distribution is that of its logits.
    Its end-of-text ids do count."""
    folder = tiny_target("llama")
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.generation_config.repetition_penalty = 50.0
    model.generation_config.eos_token_id = [0, 7]
    model.save_pretrained(tmp_path)
    target = Target.load(tmp_path)
    assert target.eos_token_ids == (0, 7)
    prompt = [5, 9, 9, 9, 9, 9]
    answers = [
        t.answer([prompt], max_new_tokens=30, ignore_eos=True)
        for t in (target, Target.load(folder))
    ]
    assert answers[0] == answers[1]
    assert len(set(answers[0][0])) < 30, "a penalty would have forbidden every repetition"


def test_sampled_answers_follow_their_seed_alone(tiny_target):
    target = Target.load(tiny_target("llama"))
    prompts = [[5, 6, 7, 8], [9, 10], [11]]
    options = {"max_new_tokens": 12, "temperature": 1.0, "ignore_eos": True}
    together = target.answer(prompts, seeds=[3, 4, 5], **options)
    alone = [
        target.answer([prompt], seeds=[seed], **options)[0]
        for prompt, seed in zip(prompts, (3, 4, 5))
    ]
    assert together == alone
    assert target.answer(prompts, seeds=[6, 7, 8], **options) != together


def test_sampled_answers_obey_their_filter(tiny_target):
    target = Target.load(tiny_target("llama"))
    prompts = [[5, 6, 7, 8]] * 40
    first = {
        answer[0] for answer in target.answer(prompts, max_new_tokens=1, temperature=1.0, top_k=3)
    }
    ids = torch.tensor([prompts[0]])
    best = (
        target.head(target.states(ids, torch.ones_like(ids), ())[1][:, -1])
        .topk(3)
        .indices[0]
        .tolist()
    )
    assert first == set(best)


def test_a_model_that_lacks_a_weight_is_refused(tiny_target, tmp_path):
    """transformers would put random numbers in its place."""
    shutil.copytree(tiny_target("llama"), tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks 1 of its weights, 'model\.norm\.weight'"):
        Target.load(tmp_path)


def test_revision_follows_the_weights_not_the_dtype(tiny_target):
    single = Target.load(tiny_target("llama"), dtype=torch.float32)
    half = Target.load(tiny_target("llama"), dtype=torch.bfloat16)
    other = Target.load(tiny_target("llama", seed=1))
    assert single.revision == half.revision != other.revision
    assert half.dtype == torch.bfloat16


def test_part_of_the_head_gives_the_same_logits(pair):
    """Scales and soft caps of the model's own included."""
    target, _ = pair
    ids = torch.tensor([0, 3, 40, target.vocab_size - 1])
    states = torch.randn(5, target.hidden_size, generator=torch.Generator().manual_seed(3))
    states = states.to(target.dtype)
    found = target.part_of_head(ids)(states)
    assert found.shape == (5, 5)
    torch.testing.assert_close(found[:, :4], target.head(states)[:, ids], **CLOSE)


class Masked(LlamaForCausalLM):
    """Never says one of its tokens, as models of images and text do not say images."""

    def forward(self, *args, **options):
        output = super().forward(*args, **options)
        output.logits.index_fill_(-1, torch.tensor([200]), -1e30)
        return output


def test_a_head_that_names_its_tokens_has_no_part(tiny_target):
    model = load_model(tiny_target("llama"), trust_remote_code=False)
    model.__class__ = Masked
    target = Target(model, tiny_target("llama"))
    for ids in ([0, 1, 2], range(10, 270)):
        assert target.part_of_head(torch.tensor(list(ids))) is None
