"""A draft LM with another tokenizer: which tokens are shared, what it reads, that its distribution
is told over the target's ids, and greedy text that no such draft changes."""

from __future__ import annotations

import pytest
import torch

from draftsmith.config import build
from draftsmith.drafters import checkpoint
from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.lm.foreign_lm import ForeignLm
from draftsmith.drafters.options import Eagle3Options
from draftsmith.drafters.target.load import load_tokenizer
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.vocabulary import shared_tokens
from draftsmith.errors import UserError
from draftsmith.serve.api import Engine as PythonEngine
from draftsmith.serve.config import EngineConfig, ServeConfig
from draftsmith.serve.config_checks import check
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.engine import EngineCore
from draftsmith.serve.load import load_drafter
from draftsmith.serve.sampling.params import SamplingParams
from draftsmith.train.check.doctor import check_models
from draftsmith.train.config import DoctorConfig
from tests.first_rounds import first_round
from tests.foreign_lm import SPACE, write_foreign
from tests.unrolled import unroll_batch


@pytest.fixture(scope="module")
def foreign(target, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("foreign")
    write_foreign(folder, target.tokenizer())
    return str(folder)


@pytest.fixture(scope="module")
def drafter(foreign, target) -> ForeignLm:
    return checkpoint.load(foreign, target, foreign=True)


def test_shared_tokens_have_one_text(foreign, target):
    ours, theirs = target.tokenizer(), load_tokenizer(foreign, trust_remote_code=False)
    shared = shared_tokens(theirs, ours, draft_size=len(theirs), target_size=target.vocab_size)
    pairs = list(zip(shared.target_ids.tolist(), shared.draft_ids.tolist(), strict=True))
    assert len(pairs) == len(set(shared.draft_ids.tolist())) > 100
    for mine, other in pairs:
        if mine == ours.eos_token_id:
            assert other == theirs.eos_token_id
        else:
            assert ours.convert_ids_to_tokens(mine).replace(
                "\u0120", SPACE
            ) == theirs.convert_ids_to_tokens(other)
    assert torch.equal(shared.to_draft[shared.target_ids], shared.draft_ids)
    assert int(shared.to_draft.min()) >= 0 and int(shared.to_draft.max()) < len(theirs)


def test_another_tokenizer_is_refused_with_the_difference_shown(foreign, target):
    with pytest.raises(UserError) as caught:
        checkpoint.load(foreign, target)
    message = str(caught.value)
    ours, theirs = target.tokenizer(), load_tokenizer(foreign, trust_remote_code=False)
    assert f"{len(ours)} tokens and the draft's {len(theirs)}" in message
    for index in range(3):
        assert f"{ours.convert_ids_to_tokens(index)!r} is {index} and " in message
    assert "--heterogeneous-vocab" in message and "\n" not in message


@torch.no_grad()
def test_the_distribution_is_the_models_own_over_the_shared_tokens(drafter, target):
    """Against the plain transformers model on translated ids."""
    text = torch.randint(3, 288, (12,), generator=torch.Generator().manual_seed(1))
    proposal = drafter.propose(first_round(drafter, target, [text.tolist()], [3]))
    whole = torch.cat([text, proposal.tokens[0]])
    plain = drafter.model.__class__.from_pretrained(drafter.lm.name)
    logits = plain(drafter.to_draft[whole][None]).logits[0]
    for depth in range(3):
        distribution = torch.full((target.vocab_size,), -torch.inf)
        distribution[drafter.target_ids] = logits[11 + depth, drafter.draft_ids]
        torch.testing.assert_close(
            proposal.logits[0, depth].softmax(-1), distribution.softmax(-1), atol=1e-5, rtol=1e-4
        )


def test_a_captured_draft_still_maps_ids(foreign, target):
    drafter = checkpoint.load(foreign, target, foreign=True)
    drafter.capture_forward()
    test_the_distribution_is_the_models_own_over_the_shared_tokens(drafter, target)


def engine(target: Target, drafter: ForeignLm | None, **changes) -> EngineCore:
    return build_engine(target, drafter, EngineConfig(k=3, **changes))


def test_it_is_taken_when_the_user_says_so(foreign, target):
    options = {"draft": foreign, "heterogeneous_vocab": True, "draft_dtype": "bfloat16"}
    config = ServeConfig(target=target.name, **options)
    check(config)
    served = load_drafter(config, target).drafter
    assert isinstance(served, ForeignLm) and served.model.dtype == torch.bfloat16
    with PythonEngine(target.name, **options, k=2, compile="off") as made:
        (answer,) = made.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True))
    assert sum(answer.speculation.offered) > 0
    findings = {
        finding.check: finding
        for finding in check_models(DoctorConfig(target=target.name, **options))
    }
    assert findings["draft.loads"].what == "draft-lm, a tokenizer of its own"
    assert "memory.training" not in findings


@torch.no_grad()
def test_what_training_would_see_of_it_is_its_distribution_too(drafter, target):
    """`doctor --data` judges it by its unroll."""
    text = torch.randint(3, 288, (1, 12), generator=torch.Generator().manual_seed(2))
    (step,) = drafter.unroll(unroll_batch(drafter, target, text, 1))
    plain = drafter.model(drafter.to_draft[text]).logits[..., drafter.draft_ids]
    torch.testing.assert_close(step.hidden @ drafter.head_weight().T, plain, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"heterogeneous_vocab": True}, "heterogeneous_vocab is given without a draft"),
        ({"draft_revision": "main"}, "draft_revision is given without a draft"),
        ({"draft": "d", "heterogeneous_vocab": True, "learn": "b"}, "vocab is given with learn b"),
    ],
)
def test_draft_options_that_mean_nothing_are_refused(options, words):
    with pytest.raises(UserError, match=words):
        check(build(ServeConfig, {"target": "t"} | options))


def test_a_head_is_no_lm_with_another_tokenizer(target, tmp_path):
    checkpoint.save(Eagle3.create(Eagle3Options(), target, seed=0), tmp_path, target)
    with pytest.raises(UserError, match="is a draft of family 'eagle3'"):
        checkpoint.load(tmp_path, target, foreign=True)


def test_a_revision_of_a_local_folder_is_refused(foreign, target):
    with pytest.raises(UserError, match="revision 'v1' is asked of draft"):
        checkpoint.load(foreign, target, revision="v1")


def test_a_draft_may_have_a_type_of_its_own(target, tmp_path):
    """With the target in float32, eagerly and captured."""
    checkpoint.save(Eagle3.create(Eagle3Options(), target, seed=0), tmp_path, target)
    config = ServeConfig(target=target.name, draft=str(tmp_path), draft_dtype="bfloat16")
    for mode in ("auto", "off"):
        drafter = load_drafter(config, target).drafter
        assert drafter.fc.weight.dtype == torch.bfloat16
        made = engine(target, drafter, compile=mode)
        made.generate(
            [[5, 6, 7, 8]], SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
        )
        assert made.stats.num_drafts > 0 and not made.stats.fallbacks
