"""Rounds without a server take as many as teacher forcing says and end where they must; that the
engine writes the same is in `test_served_text.py`."""

from __future__ import annotations

import pytest
import torch

from draftsmith.drafters.interface import ServingDrafter
from draftsmith.drafters.speculate import speculate
from draftsmith.drafters.speculate_trees import speculate_trees
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.tree_shape import parse_tree
from draftsmith.train.data.dataset import TokenSequence
from draftsmith.train.evaluate.teacher_forced import count_documents
from tests.integration.served import TreeOracle, make_drafter

K, TOKENS = 3, 24
PROMPTS = [[17], [40, 200, 11], [5, 6, 7, 8, 9, 10, 11, 12], [250, 3]]
SEEDS = [11, 12, 13, 14]


def new_draft(family: str, target: Target) -> ServingDrafter:
    # A pruned target agrees often enough for rounds to be kept whole, in part and not at all.
    options = {"target_layers": (0, 1, 2)} if family == "draft-lm" else {}
    return make_drafter(family, target, **options)


@pytest.mark.parametrize("family", ["draft-lm", "eagle3"])
def test_greedy_rounds_are_as_many_as_teacher_forcing_says(family, target):
    drafter = new_draft(family, target)
    played = speculate(
        drafter, target, PROMPTS, k=K, temperature=0.0, seeds=SEEDS, max_new_tokens=TOKENS
    )
    greedy = target.answer(PROMPTS, max_new_tokens=TOKENS)
    assert [text.tokens[text.num_prompt :] for text in played.texts] == greedy
    for number, text in enumerate(played.texts):
        ids = torch.tensor(text.tokens)
        sequence = TokenSequence(f"{number}", ids, torch.arange(len(ids)) >= text.num_prompt)
        (count,) = count_documents(drafter, target, [sequence], temperature=0.0, k=K)
        if text.num_prompt > 1 or family == "draft-lm":  # a head cannot draft after a single token
            assert count.rounds_by_k[-1] == pytest.approx(len(text.rounds))


def test_texts_end_at_the_models_last_position_and_at_their_length(target):
    drafter = new_draft("draft-lm", target)
    long = torch.randint(
        3, 288, (target.max_positions - 3,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    played = speculate(
        drafter, target, [long, [5, 6]], k=8, temperature=1.0, seeds=[1, 2], max_new_tokens=5
    )
    assert len(played.texts[0].tokens) <= target.max_positions and len(played.texts[1].tokens) <= 7
    assert all(
        sum(one.committed for one in text.rounds) == len(text.tokens) - text.num_prompt
        for text in played.texts
    )


def test_a_prompt_without_tokens_is_refused(target):
    with pytest.raises(ValueError, match="without tokens"):
        speculate(
            new_draft("draft-lm", target),
            target,
            [[]],
            k=2,
            temperature=0.0,
            seeds=[0],
            max_new_tokens=4,
        )


def test_trees_that_are_kept_for_some_tokens_leave_greedy_text_alone(target):
    answers = target.answer(PROMPTS, max_new_tokens=TOKENS, ignore_eos=True)
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, answers)]
    drafter = TreeOracle(new_draft("eagle3", target), texts)
    played = speculate_trees(
        drafter, target, PROMPTS, shape=parse_tree("dynamic:nodes=9,depth=3,width=3"),
        temperature=0.0, seeds=SEEDS, max_new_tokens=TOKENS,
    )  # fmt: skip
    for text, whole in zip(played.texts, texts):
        assert text.tokens == whole[: len(text.tokens)]
    assert {one.accepted for text in played.texts for one in text.rounds} >= {0, 1, 2}
