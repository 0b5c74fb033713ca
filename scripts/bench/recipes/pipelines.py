"""Pipelines of scripts/bench_recipes: what makes each small, and the plain training beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

FORWARD_KL, PIPELINE = "forward KL", "pipeline"
MAX_LENGTH, HELD_OUT = 512, 0.1
# A size for a target of 8 billion parameters, and what goes with one.
SMALL = ("draft.accumulate=1", f"draft.max_length={MAX_LENGTH}")


@dataclass(frozen=True)
class Evaluated:
    """An `eval` stage of the pipeline. `beside`: the plain draft is evaluated on its data, too; the
    others are of the draft of the first stage that trains."""

    stage: str
    draft: str
    text: str
    beside: bool = True


@dataclass(frozen=True)
class Pipeline:
    family: str
    trained: Mapping[str, float]  # stages that train -> their share of the time
    data: tuple[str, ...]  # stages whose answers the plain draft is trained on
    changes: tuple[str, ...]  # `--set`
    plain: tuple[str, ...]  # recipe and options of the plain training
    evaluated: tuple[Evaluated, ...]
    counts: tuple[str, ...] = field(default=("data",))  # stages that take `count` prompts


def of_8b(family: str, changes: tuple[str, ...], plain: tuple[str, ...]) -> Pipeline:
    return Pipeline(
        family, {"draft": 1.0}, ("data",),
        ("prompts=stdlib:code", "data.max_tokens=128", *SMALL, *changes),
        (f"recipes/{family}-small.yaml", *plain), (Evaluated("figures", PIPELINE, "code"),),
    )  # fmt: skip


PIPELINES = {
    "direct-alignment": Pipeline(
        "draft-lm",
        {"pretrain": 1 / 3, "align": 2 / 3},
        ("answers",),
        (),
        ("recipes/draft-lm-small.yaml", "draft_lm.target_layers=null", "draft_lm.num_layers=2"),
        (
            Evaluated("before", "pretrained alone", "code", beside=False),
            Evaluated("after", PIPELINE, "code"),
            Evaluated("before_elsewhere", "pretrained alone", "prose", beside=False),
            Evaluated("after_elsewhere", PIPELINE, "prose"),
        ),
        counts=("text", "answers"),
    ),
    "eagle3-8b": of_8b("eagle3", ("draft.optim.lr=3e-3", "draft.eagle3.draft_vocab_size=null"), ()),
    "mtp-qwen3": of_8b("mtp", ("draft.optim.lr=3e-3",), ()),
    "dflash-8b": of_8b(
        "dflash",
        ("draft.optim.lr=3e-3", "draft.dflash.num_layers=2"),
        ("dflash.num_layers=2", "dflash.block_size=16"),
    ),
}


def settings(
    pipeline: Pipeline, *, target: str, minutes: float, count: int, seed: int
) -> list[str]:
    """Words of `draftsmith run --set`."""
    words = [f"target={target}", *pipeline.changes]
    words += [f"{stage}.count={count}" for stage in pipeline.counts]
    for stage, share in pipeline.trained.items():
        words += [f"{stage}.minutes={share * minutes:g}", f"{stage}.seed={seed}"]
        words += [f"{stage}.eval_prompts=0", f"{stage}.held_out={HELD_OUT}"]
    on_trained = [one.stage for one in pipeline.evaluated if one.text == "code"]
    return words + [f"{stage}.held_out={HELD_OUT}" for stage in on_trained]
