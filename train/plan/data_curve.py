"""`draftsmith plan --data-curve`: drafts trained on parts of the data, one held-out part for all,
and the figure that more data would give.

Every part is read as often: what a run on more data would do. At equal steps the small parts would
be repeated more, and the curve would show the harm of repetition beside the lack of data.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.config import build, merge, read_yaml, to_dict
from draftsmith.drafters import checkpoint
from draftsmith.drafters.target.device import load_target
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.files import write_json
from draftsmith.train.command import run as run_training
from draftsmith.train.config import EvalConfig, TrainConfig
from draftsmith.train.data.mixture import Mixture, read_mixture
from draftsmith.train.evaluate.command import counts_of, texts_at
from draftsmith.train.evaluate.teacher_forced import DocumentCounts, merge_documents
from draftsmith.train.plan.config import PlanConfig
from draftsmith.train.plan.curve_fit import Curve, Points, Rising, Unclear, fit, verdict
from draftsmith.train.resolve import different_from

SHARES = (0.125, 0.25, 0.5, 1.0)
TIMES = (2, 4, 8)  # amounts of data extrapolated to
RESAMPLES = 1000
FAMILY = "eagle3"
RECORD = "data-curve.json"


def data_curve(config: PlanConfig) -> dict[str, Any]:
    """Trains and evaluates the drafts that are not in the folder yet, and writes the curve into
    it."""
    assert config.out is not None
    runs = [train_config(config, share) for share in SHARES]
    for run in runs:
        if not is_done(run):
            # What it prints is no part of the answer.
            with contextlib.redirect_stdout(sys.stderr):
                run_training(run)
    target = load_target(config.target, use="step", trust_remote_code=config.trust_remote_code)
    mixture = read_mixture(
        config.data, target, max_length=runs[0].max_length, held_out_share=runs[0].held_out
    )
    counts = evaluate(config, runs, target, mixture)
    tokens = [mixture.part(share).tokens_per_epoch() for share in SHARES]
    found = report(config, runs, tokens, points_of(tokens, counts))
    write_json(Path(config.out) / RECORD, found)
    return found


def train_config(config: PlanConfig, share: float) -> TrainConfig:
    """Options of the run on a share of the data: those of the recipe, for as many epochs."""
    values = {} if config.recipe is None else read_yaml(config.recipe)
    family = config.families[0] if config.families else values.get("family", FAMILY)
    given = {
        "family": family,
        "target": config.target,
        "data": config.data,
        "out": str(Path(config.out or "") / f"share-{share:g}"),
        "share": share,
        "epochs": config.epochs,
        "eval_prompts": 0,
        "trust_remote_code": config.trust_remote_code,
    }
    shape = config.by_family().get(family)
    if shape is not None:
        given[family.replace("-", "_")] = to_dict(shape)
    kept = {name: value for name, value in values.items() if name not in ("steps", "minutes")}
    return build(TrainConfig, merge(kept, given))


def is_done(run: TrainConfig) -> bool:
    """True where the folder holds the finished draft of this very run."""
    if not (Path(run.out) / checkpoint.RECORD).is_file():
        return False
    recorded = checkpoint.read_metadata(run.out).get("training", {}).get("config", {})
    return recorded.get("epochs") == run.epochs and different_from(run, recorded) is None


def evaluate(
    config: PlanConfig, runs: list[TrainConfig], target: Target, mixture: Mixture
) -> list[list[DocumentCounts]]:
    """Counts of every draft on the same texts of held-out prompts, document by document."""
    if not len(mixture.held_out):
        raise UserError(
            "no prompt is held out, and a curve needs some that no draft saw; give held_out in the "
            "recipe, or more data"
        )
    sequences = mixture.held_out.first(config.prompts)
    options = EvalConfig(
        target=config.target,
        draft="",
        data=config.data,
        k=runs[0].unroll.steps,
        draft_sampling=config.draft_sampling,
        max_length=runs[0].max_length,
        batch_size=runs[0].batch_size,
    )
    texts = texts_at(options, config.temperature, target, mixture, sequences)
    found = []
    for run in runs:
        drafter = checkpoint.load(run.out, target)
        counts = [
            one
            for own in texts.values()
            for one in counts_of(options, config.temperature, target, drafter, own)
        ]
        found.append(merge_documents(counts))
    return found


def points_of(tokens: list[int], counts: list[list[DocumentCounts]]) -> Points:
    """tau of each draft. The errors are over documents, which the drafts share: what is hard for
    all of them moves no difference between them."""
    documents = len(counts[0])
    written = np.array([one.tokens for one in counts[0]], dtype=float)
    rounds = np.array([[one.rounds_by_k[-1] for one in own] for own in counts])  # [n, D]
    if documents < 2:
        raise UserError("one held-out prompt gives no interval; hold out more, or give more data")
    random = np.random.default_rng(0)
    drawn = random.multinomial(documents, np.full(documents, 1 / documents), size=RESAMPLES)
    taus = (drawn @ written)[:, None] / (drawn @ rounds.T)
    covariance = np.cov(taus.T)
    # Drafts that do alike on every document leave it singular.
    covariance += np.eye(len(counts)) * (1e-9 + 1e-6 * float(np.trace(covariance)))
    return Points(np.array(tokens, float), written.sum() / rounds.sum(axis=1), covariance)


def report(
    config: PlanConfig, runs: list[TrainConfig], tokens: list[int], points: Points
) -> dict[str, Any]:
    curve = fit(points)
    errors = np.sqrt(np.diag(points.covariance)).tolist()
    now = float(points.values[-1])
    return {
        "family": runs[0].family,
        "epochs": config.epochs,
        "temperature": config.temperature,
        "points": [
            {"share": share, "tokens": count, "tau": value, "error": error}
            for share, count, value, error in zip(SHARES, tokens, points.values.tolist(), errors)
        ],
        "power": curve.likeliest._asdict() if isinstance(curve, Curve) else None,
        "expected": expected(curve),
        "verdict": verdict(curve, now),
        "note": "errors are over held-out documents; another seed of training moves tau too",
    }


def expected(curve: Curve | Rising | Unclear) -> dict[str, dict[str, float]]:
    """tau by the times of the data; nothing where none was found."""
    if not isinstance(curve, Curve):
        return {}
    return {str(times): curve.expected(times)._asdict() for times in TIMES}


def curve_table(found: dict[str, Any]) -> str:
    lines = [f"{'data':>6}  {'tokens':>12}  tau of {found['family']}"]
    lines += [
        f"{one['share']:>6g}  {one['tokens']:>12,}  {one['tau']:.3f} +- {1.96 * one['error']:.3f}"
        for one in found["points"]
    ]
    lines += [
        f"{'x' + times:>6}  {'expected':>12}  {one['value']:.3f} "
        f"({one['low']:.3f}-{one['high']:.3f})"
        for times, one in found["expected"].items()
    ]
    return "\n".join([*lines, found["verdict"], found["note"]])
