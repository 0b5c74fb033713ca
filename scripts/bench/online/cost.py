"""Gain of learning after a sudden shift beside its cost: fewer steps, larger updates, fewer
depths, distributions from the records, and recipes of pipelines."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from draftsmith.config import build, read_yaml
from draftsmith.distill.config import LearnConfig
from draftsmith.distill.daemon import Daemon
from draftsmith.drafters.published import versions
from scripts.bench.markdown_table import header, line
from scripts.bench.online.cells import (
    FIRST,
    PIPELINES,
    POINTS,
    SECOND,
    Cell,
    Pipeline,
    Point,
    part_of,
)
from scripts.bench.online.domains import asks
from scripts.bench.online.figures import final_alpha, pooled_alpha
from scripts.bench.online.measures import cpu_seconds, of_domain, over_seeds
from scripts.bench.online.setting import GATE, LEARN, MAX_LENGTH, Setting
from scripts.bench.online.streams import blocks
from scripts.bench.online.world import K, World
from scripts.paths import ROOT

Row = dict[str, Any]
Result = TypeVar("Result")
BEFORE = 0.07  # requests of the first domain, per request after the shift
JUDGED, JUDGED_AT = 48, 10**6  # texts that drafts are compared on, away from the stream
DRAFTED = ("accepted", "first-rejected")  # what records hold distributions of


def learn_config(name: str) -> LearnConfig:
    """Options of learning of one row of the table."""
    return recipe_config(PIPELINES[name]) if name in PIPELINES else point_config(POINTS[name])


def recipe_config(pipeline: Pipeline) -> LearnConfig:
    """The recipe's options of learning, at the stream's k and length of texts."""
    recipe = read_yaml(ROOT / "recipes" / "pipelines" / f"{pipeline.recipe}.yaml")
    (stage,) = (one for one in recipe["stages"] if one["name"] == "learn")
    found = build(LearnConfig, stage["options"]["learn"])
    found = replace(found, unroll=replace(found.unroll, steps=K), max_length=MAX_LENGTH)
    if not pipeline.is_at_our_rate:
        return found
    return replace(found, lr=LEARN.lr, warmup_steps=warmup_steps(found.steps, found.fresh))


def warmup_steps(steps: int, fresh: int) -> int:
    """Steps of a warm-up over as many texts as the setting's, with `steps` for `fresh` texts."""
    return round(LEARN.warmup_steps * steps / fresh * LEARN.fresh / LEARN.steps)


def point_config(point: Point) -> LearnConfig:
    """The setting's options with those of the point."""
    return replace(
        LEARN,
        steps=point.steps,
        fresh=point.fresh,
        batch=point.batch,
        lr=point.rate * LEARN.lr,
        warmup_steps=warmup_steps(point.steps, point.fresh),
        unroll=replace(LEARN.unroll, steps=point.depths),
        teacher=point.teacher,
        dtype=point.dtype,
        positions=DRAFTED if point.teacher == "recorded" else LEARN.positions,
    )


def run_cost(setting: Setting, cell: Cell) -> Row:
    """One point of the curve: a stream that shifts once, served and learned from."""
    requests = int(cell.arguments["requests"])
    stream = asks(
        setting.prompts(cell.seed), blocks((FIRST, part_of(requests, BEFORE)), (SECOND, requests))
    )
    with setting.room(f"cost-{cell.name}-{cell.seed}") as folder:
        draft = setting.draft(cell.seed)
        learn = learn_config(cell.name)
        world = World(
            setting.target, draft, folder, learn, gate=GATE, seed=cell.seed,
            record_taps=MAX_LENGTH if learn.teacher == "recorded" else 0,
        )  # fmt: skip
        training, reading = Timed.of(world.daemon)
        answers = [answer.to_dict() for answer in world.serve(stream)]
        counters = world.daemon.counters
        static = setting.load(draft)
        live = setting.load(versions.folder_of(world.root, world.live))
        texts = setting.texts(static, SECOND, JUDGED, seed=cell.seed, begin=JUDGED_AT)
        alphas = {"static": setting.alpha(static, texts), "live": setting.alpha(live, texts)}
        return {
            "answers": answers,
            "steps": counters.updates * learn.steps,
            "texts": counters.texts,
            "positions": counters.positions_trained,
            "training_s": training.seconds,
            "reading_s": reading.seconds,
            "published": world.live - 1,
            "alphas": alphas,
        }


@dataclass
class Timed:
    """CPU seconds of this thread within a function."""

    seconds: float = 0.0

    @classmethod
    def of(cls, daemon: Daemon) -> tuple[Timed, Timed]:
        """Times updates, which are training without the gate and the watch, and passes of the
        target over texts that are trained or scored, from here on."""
        training, reading, learner = cls(), cls(), daemon.shared.learner
        learner.update = training.wrapped(learner.update)  # type: ignore[method-assign]
        daemon.states._read = reading.wrapped(daemon.states._read)
        return training, reading

    def wrapped(self, function: Callable[..., Result]) -> Callable[..., Result]:
        def call(*arguments: Any) -> Result:
            begun_s = time.thread_time()
            result = function(*arguments)
            self.seconds += time.thread_time() - begun_s
            return result

        return call


# The table.


def cost_table(rows: Sequence[Row]) -> list[str]:
    found = {name: by_seed(rows, name) for name in (*POINTS, *PIPELINES)}
    dearest = found[next(iter(POINTS))]
    lines = header(
        "steps per texts", "seeds", "CPU s of learning per CPU s of serving", "of it training",
        "of it passes of the target", "positions trained", "alpha after the shift", "alpha at the end", "gain at the end",
        "of the gain of the first row", "of its gain over the stream",
    )  # fmt: skip
    for name, results in found.items():
        if not results:
            continue
        values = list(results.values())
        cells = [
            over_seeds([relative_cost(one) for one in values]).text(1),
            over_seeds([training_share(one) for one in values]).text(2),
            over_seeds([reading_share(one) for one in values]).text(2),
            f"{sum(one['positions'] for one in values) / len(values):.0f}",
            over_seeds([pooled_alpha(after(one)) for one in values]).text(),
            over_seeds([final_alpha(after(one)) for one in values]).text(),
            over_seeds([gain_at_end(one) for one in values]).text(),
            share(results, dearest, gain_at_end), share(results, dearest, mean_gain),
        ]  # fmt: skip
        lines.append(line(told(name), len(values), *cells))
    return lines if len(lines) > 2 else []


def by_seed(rows: Sequence[Row], name: str) -> dict[int, Row]:
    return {
        row["cell"]["seed"]: row["result"]
        for row in rows
        if (row["cell"]["part"], row["cell"]["name"]) == ("cost", name)
    }


def share(results: dict[int, Row], dearest: dict[int, Row], gain: Callable[[Row], float]) -> str:
    """Share of the dearest point's gain, seed by seed; "-" where that has gained nothing."""
    pairs = [(gain(one), gain(dearest[seed])) for seed, one in results.items() if seed in dearest]
    values = [mine / whole if whole > 0 else math.nan for mine, whole in pairs]
    return over_seeds(values).text(2)


def told(name: str) -> str:
    return told_recipe(PIPELINES[name]) if name in PIPELINES else told_point(POINTS[name])


def told_recipe(pipeline: Pipeline) -> str:
    learn = recipe_config(pipeline)
    rate = ", at our learning rate" if pipeline.is_at_our_rate else ""
    return f"{learn.steps} per {learn.fresh}, `{pipeline.recipe}.yaml`{rate}"


def told_point(point: Point) -> str:
    extras = []
    if point.batch != Point.batch:
        extras.append(f"{point.batch} texts a step")
    if point.depths != Point.depths:
        extras.append(f"{point.depths} of {Point.depths} depths")
    if point.rate != Point.rate:
        extras.append(f"{point.rate:g} times the rate")
    if point.dtype != Point.dtype:
        extras.append(f"`learn.dtype={point.dtype}`")
    if point.teacher != Point.teacher:
        extras.append(f"`learn.teacher={point.teacher}`")
    return ", ".join([f"{point.steps} per {point.fresh}", *extras])


def after(result: Row) -> list[Row]:
    """Answers of the second domain, in order."""
    return list(of_domain(result["answers"], SECOND))


def relative_cost(result: Row) -> float:
    serving, learning = cpu_seconds(result["answers"])
    return learning / serving


def training_share(result: Row) -> float:
    """Share of training in the CPU time of learning; the rest is gate and watch."""
    return result["training_s"] / learning_s(result)


def reading_share(result: Row) -> float:
    """Share of the target's passes over texts; NaN in cells from before they were timed."""
    return float(result.get("reading_s", math.nan)) / learning_s(result)


def learning_s(result: Row) -> float:
    return float(max(one["learn_s"] for one in result["answers"]))


def gain_at_end(result: Row) -> float:
    return result["alphas"]["live"] - result["alphas"]["static"]


def mean_gain(result: Row) -> float:
    """Over all requests after the shift, against the static draft's alpha on other texts."""
    return pooled_alpha(after(result)) - result["alphas"]["static"]


def cost_summary(result: Row) -> Row:
    """The result without single requests."""
    serving, learning = cpu_seconds(result["answers"])
    return {name: value for name, value in result.items() if name != "answers"} | {
        "alpha_after": pooled_alpha(after(result)),
        "alpha_at_end": final_alpha(after(result)),
        "serving_s_per_1000": serving,
        "learning_s_per_1000": learning,
    }
