"""Options of `draftsmith generate` for drafts: what they make of a server's, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from draftsmith import config as configuration
from draftsmith.commands.generate import GenerateConfig, answers_of, check, drafts_of
from draftsmith.distill.generate.prompts import Prompt
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
    config = options(draft="folder", draft_dtype="bfloat16", batch=24, k=3, suffix=True)
    check(config)
    served = config.served(77)
    assert (served.draft, served.draft_dtype, served.suffix) == ("folder", "bfloat16", True)
    engine = served.engine_config()
    assert (engine.max_batch, engine.max_length, engine.k) == (24, 77, 3)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"draft": "d", "url": "http://h"}, "draft is given with --url"),
        ({"suffix": True, "keep_answers": True}, "suffix is given with --keep-answers"),
        ({"k": 3}, "k is 3 and nothing drafts"),
    ],
)
def test_options_that_draft_nothing_are_refused(values: dict, says: str) -> None:
    with pytest.raises(UserError, match=says):
        check(options(**values))


def test_sampled_answers_name_what_their_draws_depend_on_and_greedy_ones_nothing() -> None:
    found = drafts_of(options(draft="folder", k=2), "ab12")
    assert found == {"draft": "folder", "revision": "ab12", "k": 2}
    # A default that is written out is no other run.
    plain, written = (drafts_of(options(suffix=True, k=k), None) for k in (None, 4))
    assert plain == written == {"k": 4, "suffix": True}
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
        return answers._request(Prompt("", False, [60, 61]), 5).seed

    drafts = [{"draft": str(tmp_path / "0")}, {"draft": str(tmp_path / "1")}]
    first, second = (seed_with(**draft) for draft in drafts)
    plain, looked_up = seed_with(), seed_with(suffix=True)
    assert len({first, second, plain}) == 3 and looked_up == plain
    assert seed_with(**drafts[0]) == first
    assert seed_with(**drafts[0], suffix=True) == first
