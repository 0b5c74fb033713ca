"""Streams of requests served by a learning draft, and by those that learn nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from draftsmith.distill.buffer.traffic import ServedText
from draftsmith.distill.config import LearnConfig
from draftsmith.distill.learn.learner import Learner, Rest, UpdateReport, no_rest
from draftsmith.drafters.interface import ServingDrafter, TrainedDrafter
from draftsmith.drafters.published import versions
from draftsmith.drafters.text.ngram import Ngram
from draftsmith.drafters.text.suffix import Suffix
from scripts.bench.markdown_table import header, line
from scripts.bench.online import measures
from scripts.bench.online.cells import BASELINES, CURVES, FIRST, REQUESTS, SECOND, Cell
from scripts.bench.online.domains import DOMAINS, asks
from scripts.bench.online.figures import pooled_tau
from scripts.bench.online.paired import Shadow, paired
from scripts.bench.online.setting import LEARN, Setting, learning
from scripts.bench.online.world import Answer, World

WARM_SHARE, RECENT = 0.9, 100  # of the warm draft's tau, over so many requests
EVALUATED = 10**6  # numbers of the requests that drafts are compared on, away from any stream
# Of an offline run, as long as learning was: the rate falls in three stages.
OFFLINE_RATES = ((0.6, 2.0), (0.25, 0.6), (0.15, 0.2))  # share of the steps, of the online rate


def run_curve(setting: Setting, cell: Cell) -> dict[str, Any]:
    curve, requests = CURVES[cell.name], int(cell.arguments["requests"])
    stream = asks(setting.prompts(cell.seed), curve.stream(requests))
    chosen = learning(curve.learner, requests)
    with setting.room(f"{cell.name}-{cell.seed}") as folder:
        draft = setting.draft(cell.seed, curve.start)
        world = World(setting.target, draft, folder, chosen.learn, gate=chosen.gate, seed=cell.seed)
        taught = Taught(world)
        shadow = Shadow(world) if curve.is_paired else None
        goal = warm_tau(setting, cell) if curve.ends_at_warm else float("inf")
        answers = list(until(world.serve(stream), goal * WARM_SHARE))
        compared = (
            compare(setting, cell, world, taught.texts, answers) if curve.is_compared else None
        )
        return {
            "answers": [answer.to_dict() for answer in answers],
            "decisions": versions.read_decisions(world.root),
            "updates": world.daemon.counters.updates,
            "trained_texts": world.daemon.counters.texts,
            "goal": goal if curve.ends_at_warm else None,
            "compared": compared,
            "paired": paired(setting, world, shadow, cell.seed) if shadow else None,
        }


class Taught:
    """Remembers what the learner was given: the same tokens that an offline run then gets."""

    def __init__(self, world: World):
        self.texts: list[ServedText] = []
        self._update = world.daemon.shared.learner.update
        world.daemon.shared.learner.update = self._told  # type: ignore[method-assign]

    def _told(self, fresh: Sequence[ServedText], rest: Rest = no_rest) -> UpdateReport:
        self.texts += fresh
        return self._update(fresh, rest)


def until(answers: Iterator[Answer], tau: float) -> Iterator[Answer]:
    """Ends once the latest requests reach `tau`."""
    recent: list[Answer] = []
    for answer in answers:
        recent = [*recent, answer][-RECENT:]
        yield answer
        if len(recent) == RECENT and pooled_tau([one.to_dict() for one in recent]) >= tau:
            return


def warm_tau(setting: Setting, cell: Cell) -> float:
    """Pooled tau of the warm draft on requests of its own domain."""
    some = list(asks(setting.prompts(cell.seed), [FIRST] * part(cell), begin=EVALUATED))
    answers, _ = setting.served(setting.load(setting.draft(cell.seed)), some, seed=EVALUATED)
    return pooled_tau([one.to_dict() for one in answers])


def part(cell: Cell) -> int:
    return max(16, int(cell.arguments["requests"]) * 200 // REQUESTS)


def compare(
    setting: Setting,
    cell: Cell,
    world: World,
    taught: Sequence[ServedText],
    answers: Sequence[Answer],
) -> dict[str, float]:
    """Drafts on the same texts of the second domain, which the live version serves: learned (live
    at the end, and when the first domain returned), static, offline."""
    static, online = setting.load(setting.draft(cell.seed)), world.daemon.shared.live.draft
    last = max((one for one in answers if one.domain == SECOND), key=lambda one: one.number)
    at_return = setting.load(versions.folder_of(world.root, last.version))
    offline = setting.load(setting.draft(cell.seed))
    of_second = [text for text in taught if text.records[0].request_class == SECOND]
    distill(offline, setting, of_second, seed=cell.seed)
    texts = setting.texts(online, SECOND, part(cell), seed=cell.seed, begin=EVALUATED)
    names = {"static": static, "online": online, "at_return": at_return, "offline": offline}
    return {name: setting.alpha(drafter, texts) for name, drafter in names.items()} | {
        "texts": len(of_second)
    }


def distill(
    drafter: TrainedDrafter, setting: Setting, texts: Sequence[ServedText], *, seed: int
) -> None:
    """As the learner trains, as many steps, but with all texts at hand from the beginning, in any
    order, at a rate that falls."""
    steps = max(1, LEARN.steps * len(texts) // LEARN.fresh)
    for share, rate in OFFLINE_RATES:
        config = LearnConfig(
            lr=rate * LEARN.lr,
            steps=max(1, round(share * steps)),
            unroll=LEARN.unroll,
            max_length=LEARN.max_length,
            replay=0.0,
        )
        Learner(drafter, setting.target, config, seed=seed).update(list(texts))


def compared_table(rows: Sequence[Any]) -> list[str]:
    """Streams that end beside an offline draft, seed by seed: what each gained and cost."""
    lines = header(
        "stream", "seed", f"alpha gained when {FIRST} returns", "share of the offline draft's",
        "alpha gained at the end", "share of the offline draft's",
        f"requests to 90 % of the final alpha, {SECOND}", f"alpha on {FIRST} at return / before",
        "CPU s of learning per CPU s of serving",
    )  # fmt: skip
    for name in (name for name, curve in CURVES.items() if curve.is_compared):
        answers = measures.curves(rows, name)
        figures = zip(
            measures.gains(rows, name, "at_return"),
            measures.shares_of_offline(rows, name, "at_return"),
            measures.gains(rows, name),
            measures.shares_of_offline(rows, name),
            measures.recoveries(rows, name, SECOND),
            measures.returns(rows, name),
            strict=True,
        )
        for (seed, own), (*alphas, requests, at_return) in zip(answers.items(), figures):
            serving, learning = measures.cpu_seconds(own)
            cells = [*(f"{alpha:.3f}" for alpha in alphas), f"{requests:.0f}", f"{at_return:.3f}"]
            lines.append(line(name, seed, *cells, f"{learning / serving:.2f}"))
    return lines


def run_baselines(setting: Setting, cell: Cell) -> dict[str, Any]:
    """Each of them answers the same requests of every domain."""
    stream = [domain for domain in DOMAINS for _ in range(int(cell.arguments["requests"]))]
    prompts = setting.prompts(cell.seed)
    answers = {}
    for name in BASELINES:
        drafter = baseline(setting, name, cell.seed)
        served, _ = setting.served(
            drafter, list(asks(prompts, stream, begin=EVALUATED)), seed=cell.seed
        )
        answers[name] = [answer.to_dict() for answer in served]
    return {"answers": answers}


def baseline(setting: Setting, name: str, seed: int) -> ServingDrafter:
    made = {"ngram": Ngram, "suffix": Suffix}
    return made[name]() if name in made else setting.load(setting.draft(seed))
