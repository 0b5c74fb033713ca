"""Changes of the learner, each beside the learner as it is, on texts of one stream and without a
gate: replayed texts that are like the fresh ones, and a learning rate that falls."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from draftsmith.distill.buffer.traffic import ServedText, is_held_out
from draftsmith.distill.learn.learner import Learner, Reservoir
from draftsmith.distill.learn.text_states import TextStates, states_of
from draftsmith.drafters.interface import TrainedDrafter
from scripts.bench.markdown_table import header, line
from scripts.bench.online.cells import ALIKE, CHANGES, FALLING, FIRST, SECOND, Cell, again, part_of
from scripts.bench.online.cost import BEFORE
from scripts.bench.online.curves import distill
from scripts.bench.online.domains import asks
from scripts.bench.online.measures import over_seeds, results
from scripts.bench.online.paired import alphas, pooled
from scripts.bench.online.setting import GATE, LEARN, Setting
from scripts.bench.online.streams import Stream, blocks

Row = dict[str, Any]
JUDGED, JUDGED_AT = 64, 6 * 10**6  # texts away from the stream
LAST = 0.2  # share of the texts over which the rate falls
LOWEST = 0.1  # of the rate
LIVE, LIKE = "as it is", "of the same domain first"


def run_changes(setting: Setting, cell: Cell) -> Row:
    return (run_rate if cell.name == FALLING else run_replay)(setting, cell)


def stream_of(setting: Setting, cell: Cell, stream: Stream) -> list[ServedText]:
    """Texts of a stream that the static draft serves."""
    static = setting.load(setting.draft(cell.seed))
    return setting.served(static, list(asks(setting.prompts(cell.seed), stream)), seed=cell.seed)[1]


def taught(texts: Sequence[ServedText]) -> list[ServedText]:
    return [one for one in texts if not is_held_out(one, GATE.held_out, GATE.held_out_by)]


# Replay.


@dataclass
class AlikeReservoir(Reservoir):
    """Reservoir that gives texts of one domain first: an upper bound of what any likeness finds."""

    domain: str = ""

    def sample(self, count: int, rng: random.Random) -> list[ServedText]:
        held = {tuple(one.tokens): one for one in [*self.texts, *self.latest]}.values()
        alike = [one for one in held if domain_of(one) == self.domain]
        others = [one for one in held if domain_of(one) != self.domain]
        found = rng.sample(alike, min(count, len(alike)))
        return found + rng.sample(others, min(count - len(found), len(others)))


def domain_of(text: ServedText) -> str:
    return text.records[0].request_class


def run_replay(setting: Setting, cell: Cell) -> Row:
    """The recurring stream, each text drafted by the newest candidate trained on earlier ones."""
    texts = stream_of(setting, cell, again(int(cell.arguments["requests"])))
    drafter = setting.load(setting.draft(cell.seed))
    return {
        "requests": len(texts),
        "static": pooled(one.alpha for one in alphas(setting, drafter, texts)),
        LIVE: at_once(setting, cell, texts, Reservoir),
        LIKE: at_once(setting, cell, texts, AlikeReservoir),
    }


def at_once(
    setting: Setting, cell: Cell, texts: Sequence[ServedText], kind: type[Reservoir]
) -> float:
    """alpha of candidates that are live as soon as they are trained."""
    drafter = setting.load(setting.draft(cell.seed))
    learner = Learner(drafter, setting.target, LEARN, seed=cell.seed)
    reservoir = learner.reservoir = kind(LEARN.reservoir, tap_bytes=learner.reservoir.tap_bytes)
    found, fresh = [], []
    for begin in range(0, len(texts), LEARN.fresh):
        some = texts[begin : begin + LEARN.fresh]
        with learner.averaged():
            found += [one.alpha for one in alphas(setting, drafter, some)]
        fresh += taught(some)
        if len(fresh) >= LEARN.fresh:
            if isinstance(reservoir, AlikeReservoir):
                ((reservoir.domain, _),) = Counter(map(domain_of, fresh)).most_common(1)
            learner.update(fresh)
            fresh = []
    return pooled(found)


# The learning rate.


def run_rate(setting: Setting, cell: Cell) -> Row:
    """The sudden shift: one learner for most of the stream, which then goes on at its rate and, from
    the same weights and moments, at one that falls; and a draft distilled offline."""
    requests = int(cell.arguments["requests"])
    stream = blocks((FIRST, part_of(requests, BEFORE)), (SECOND, requests))
    texts = [one for one in taught(stream_of(setting, cell, stream)) if domain_of(one) == SECOND]
    static = setting.load(setting.draft(cell.seed))
    judged = setting.texts(static, SECOND, JUDGED, seed=cell.seed, begin=JUDGED_AT)
    cut = round(len(texts) * (1 - LAST)) // LEARN.fresh * LEARN.fresh
    states = states_of(setting.target, LEARN)
    learner = Learner(
        setting.load(setting.draft(cell.seed)), setting.target, LEARN, seed=cell.seed, states=states
    )
    feed(learner, texts[:cut], lambda _: 1.0)
    offline = setting.load(setting.draft(cell.seed))
    distill(offline, setting, texts, seed=cell.seed)
    found = {"static": setting.alpha(static, judged), "offline": setting.alpha(offline, judged)}
    rates: dict[str, Callable[[float], float]] = {
        "constant": lambda _: 1.0,
        "falling": lambda share: 1.0 - (1.0 - LOWEST) * share,
    }
    for name, rate in rates.items():
        twin = twin_of(setting, cell, learner, states)
        feed(twin, texts[cut:], rate)
        with twin.averaged() as drafter:
            found[name] = setting.alpha(drafter, judged)
    return {"texts": len(texts), "alphas": found}


def feed(learner: Learner, texts: Sequence[ServedText], rate_at: Callable[[float], float]) -> None:
    """Updates of eight texts; `rate_at` gives the rate's factor at a share of the texts."""
    for begin in range(0, len(texts) - LEARN.fresh + 1, LEARN.fresh):
        share = (begin + LEARN.fresh) / len(texts)
        learner.config = replace(LEARN, lr=LEARN.lr * rate_at(share))
        learner.update(texts[begin : begin + LEARN.fresh])


def twin_of(setting: Setting, cell: Cell, learner: Learner, states: TextStates) -> Learner:
    """Another learner in the same state."""
    drafter: TrainedDrafter = setting.load(setting.draft(cell.seed))
    twin = Learner(drafter, setting.target, LEARN, seed=cell.seed, states=states)
    weights = {name: one.detach().clone() for name, one in learner.parameters.items()}
    moments = {name: one.clone() for name, one in learner.moments().items()}
    twin.fill(learner.steps, weights, moments)
    twin.reservoir, twin.updates = copy.deepcopy(learner.reservoir), learner.updates
    return twin


# The tables.


def replay_table(rows: Sequence[Row]) -> list[str]:
    found = list(results(rows, CHANGES, ALIKE).values())
    lines = header("replayed texts", "seeds", "static alpha", "alpha", "gain")
    for name in (LIVE, LIKE):
        if found:
            static, mine = ([one[key] for one in found] for key in ("static", name))
            gains = [one - other for one, other in zip(mine, static, strict=True)]
            cells = [over_seeds(some).text() for some in (static, mine, gains)]
            lines.append(line(name, len(found), *cells))
    return lines if found else []


def rate_table(rows: Sequence[Row]) -> list[str]:
    found = [one["alphas"] for one in results(rows, CHANGES, FALLING).values()]
    lines = header("draft", "seeds", "alpha", "of the offline draft's")
    for name in ("static", "constant", "falling", "offline"):
        if found:
            shares = [one[name] / one["offline"] for one in found]
            told = [over_seeds(some).text() for some in ([one[name] for one in found], shares)]
            lines.append(line(name, len(found), *told))
    return lines if found else []
