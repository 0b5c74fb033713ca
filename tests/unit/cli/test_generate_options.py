"""Options of `draftsmith generate` for drafts: what they make of a server's, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from draftsmith import config as configuration
from draftsmith.commands.generate import GenerateConfig, answers_of, check, drafts_of
from draftsmith.distill.generate.writers import AskedServer
from draftsmith.drafters import checkpoint
from draftsmith.drafters.options import MedusaOptions
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.serve.engine import build

REQUIRED = {"target": "t", "prompts": "stdlib:prose", "out": "d", "max_tokens": 16}


def options(**values: object) -> GenerateConfig:
    return configuration.build(GenerateConfig, REQUIRED | values)


def test_drafts_are_those_of_a_server_with_the_same_options() -> None:
    config = options(
        draft="folder",
        draft_dtype="bfloat16",
        temperature=[0.0],
        batch=24,
        speculation={"k": "auto", "verification": "block"},
        lookup={"suffix": True, "suffix_share": 0.5},
    )
    check(config)
    served = config.served(77)
    assert (served.draft, served.draft_dtype, served.lookup.suffix_share) == (
        "folder",
        "bfloat16",
        0.5,
    )
    engine = served.engine_config()
    assert (engine.max_batch, engine.max_length, engine.adaptive) == (24, 77, True)
    assert engine.verification == "block"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"draft": "d", "url": "http://h"}, "draft is given with --url"),
        ({"lookup": {"ngram": True}, "keep_answers": True}, "ngram is given with --keep-answers"),
        ({"speculation": {"k": "3"}}, "k is 3 and nothing drafts"),
        ({"lookup": {"ngram": True}, "draft": "d"}, "ngram is given together with a trained"),
        ({"draft": "d", "speculation": {"k": "many"}}, "k is 'many'"),
        ({"draft": "d", "speculation": {"verification": "typical"}}, "verification is typical"),
        (
            {"draft": "d", "speculation": {"synthetic_acceptance": [0.5]}},
            "synthetic_acceptance is",
        ),
        ({"draft": "d", "speculation": {"k": "auto"}}, "k is auto at temperature 1"),
        (
            {"draft": "d", "temperature": [0.0, 0.7], "speculation": {"k_schedule": "1:4"}},
            "k_schedule is 1:4 at temperature 0.7",
        ),
    ],
)
def test_options_that_draft_nothing_or_change_the_answers_are_refused(
    values: dict, says: str
) -> None:
    with pytest.raises(UserError, match=says):
        check(options(**values))


def test_sampled_answers_name_what_their_draws_depend_on_and_greedy_ones_nothing() -> None:
    sampled = options(draft="folder", speculation={"tree": "dynamic"})
    found = drafts_of(sampled, "ab12")
    assert found is not None
    assert (found["draft"], found["revision"], found["tree"]) == ("folder", "ab12", "dynamic")
    # A default that is written out is no other run.
    plain, written = options(lookup={"ngram": True}), {"k": "4"}
    assert drafts_of(plain, None) == drafts_of(
        options(lookup={"ngram": True}, speculation=written), None
    )
    assert drafts_of(options(draft="folder", temperature=[0.0]), "ab12") is None
    assert drafts_of(options(), None) is None


def test_a_draft_meets_no_draws_that_it_may_have_learned(
    tiny_target: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft trained on answers to the same prompts and seeds draws others with them."""
    monkeypatch.setattr(build, "capture_forwards", lambda *given: None)
    target = Target.load(tiny_target("llama"))
    for seed in (0, 1):
        drafter = FAMILIES["medusa"].create(MedusaOptions(), target, seed=seed)
        checkpoint.save(drafter, tmp_path / str(seed), target)

    def seed_with(**values: object) -> int:
        answers = answers_of(target, 40, options(**values))
        return answers._request(AskedServer([60, 61], 1.0, 5)).seed

    drafts = [{"draft": str(tmp_path / "0")}, {"draft": str(tmp_path / "1")}]
    first, second = (seed_with(**draft) for draft in drafts)
    plain, looked_up = seed_with(), seed_with(lookup={"ngram": True})
    assert len({first, second, plain}) == 3 and looked_up == plain
    assert seed_with(**drafts[0]) == first
    assert seed_with(**drafts[0], lookup={"suffix": True}) == first
