"""Drafts of request classes on three domains at once: a draft for each against one for all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from draftsmith.distill.buffer.traffic import ServedText
from draftsmith.distill.config import PoolConfig
from draftsmith.drafters.interface import TrainedDrafter
from draftsmith.drafters.published import versions
from draftsmith.drafters.published.pool import DraftPool, read_pool
from draftsmith.drafters.published.prompt_clusters import PromptClusters
from scripts.bench.online.cells import BOUND, CLUSTERED, SINGLE, STATIC, Cell
from scripts.bench.online.curves import distill
from scripts.bench.online.domains import DOMAINS, Ask, asks
from scripts.bench.online.setting import GATE, LEARN, Setting
from scripts.bench.online.streams import mixed
from scripts.bench.online.world import NO_POOL, World

Row = dict[str, Any]
BEGINS = 0.05  # of the stream's requests, of one class, begin a draft for it
JUDGED, JUDGED_AT = 32, 5 * 10**6  # texts per domain that drafts are compared on
TAUGHT_AT = 4 * 10**6
SHARED = "shared"  # the draft of all requests


def run_pools(setting: Setting, cell: Cell) -> Row:
    if cell.name == BOUND:
        return run_bound(setting, cell)
    count = int(cell.arguments["requests"])
    stream = list(asks(setting.prompts(cell.seed), mixed(list(DOMAINS), count, seed=cell.seed)))
    return static(setting, cell, stream) if cell.name == STATIC else learned(setting, cell, stream)


def static(setting: Setting, cell: Cell, stream: Sequence[Ask]) -> Row:
    answers, _ = setting.served(setting.load(setting.draft(cell.seed)), stream, seed=cell.seed)
    return {"answers": [answer.to_dict() for answer in answers]}


def learned(setting: Setting, cell: Cell, stream: Sequence[Ask]) -> Row:
    pool = PoolConfig(most=len(DOMAINS), requests=max(8, round(BEGINS * len(stream))))
    with setting.room(f"{cell.name}-{cell.seed}") as folder:
        world = World(
            setting.target, setting.draft(cell.seed), folder, LEARN, gate=GATE, seed=cell.seed,
            pool=NO_POOL if cell.name == SINGLE else pool, is_tagged=cell.name != CLUSTERED,
        )  # fmt: skip
        answers = [answer.to_dict() for answer in world.serve(stream)]
        found = read_pool(world.root) or DraftPool()
        return {
            "answers": answers,
            "drafts": len(found.classes),
            "classes": [one for one in versions.read_decisions(world.root) if "folder" in one],
            "published": world.live - 1,
            "updates": world.daemon.counters.updates,
            "sorted": None if found.clusters is None else sorted_by(found.clusters, stream),
            "alphas": alphas(setting, cell, world),
        }


def sorted_by(clusters: PromptClusters, stream: Sequence[Ask]) -> dict[str, dict[str, int]]:
    """Requests by cluster and domain, as the clusters of the end sort the whole stream."""
    found: dict[str, Counter[str]] = {}
    for ask in stream:
        found.setdefault(clusters.nearest(ask.prompt), Counter())[ask.domain] += 1
    return {name: dict(counts) for name, counts in found.items()}


def alphas(setting: Setting, cell: Cell, world: World) -> dict[str, dict[str, float]]:
    """Exact alpha by domain on texts of no stream, at its end: of the shared draft, and of each
    class's, the one that serves and the candidate."""
    judged = judged_texts(setting, cell.seed)
    found = {SHARED: by_domain(setting, world.daemon.shared.live.draft, judged)}
    for name, member in world.daemon.pool.members.items():
        if member.is_serving:
            found[f"{name}, serving"] = by_domain(setting, member.track.live.draft, judged)
        with member.track.learner.averaged() as candidate:
            found[f"{name}, candidate"] = by_domain(setting, candidate, judged)
    return found


def judged_texts(setting: Setting, seed: int) -> dict[str, list[ServedText]]:
    return texts(setting, seed, JUDGED, begin=JUDGED_AT)


def texts(setting: Setting, seed: int, count: int, *, begin: int) -> dict[str, list[ServedText]]:
    """Texts of each domain, served with the static draft."""
    served_by = setting.load(setting.draft(seed))
    return {
        domain: setting.texts(served_by, domain, count, seed=seed, begin=begin)
        for domain in DOMAINS
    }


def by_domain(
    setting: Setting, drafter: TrainedDrafter, judged: dict[str, list[ServedText]]
) -> dict[str, float]:
    return {domain: setting.alpha(drafter, some) for domain, some in judged.items()}


# What a perfect choice could gain: drafts distilled offline on one domain each.


def run_bound(setting: Setting, cell: Cell) -> Row:
    """Each draft takes one step per text. `requests` texts of each domain in the first rows; in
    the last two as many of each domain as the first single draft has of all."""
    count = int(cell.arguments["requests"])
    every = texts(setting, cell.seed, count * len(DOMAINS), begin=TAUGHT_AT)
    few = {domain: some[:count] for domain, some in every.items()}
    judged = judged_texts(setting, cell.seed)
    begun = setting.load(setting.draft(cell.seed))
    one, whole = (
        trained(setting, cell.seed, [text for some in kinds.values() for text in some])
        for kinds in (few, every)
    )
    further = {name: value.clone() for name, value in one.state_dict().items()}
    return {
        "texts": count,
        "alphas": {
            "static": by_domain(setting, begun, judged),
            "one": by_domain(setting, one, judged),
            "three": own(setting, cell.seed, few, judged),
            "three, from the one": own(setting, cell.seed, few, judged, further),
            "three, as many tokens each": own(setting, cell.seed, every, judged),
            "one, from all of these": by_domain(setting, whole, judged),
        },
    }


def own(
    setting: Setting,
    seed: int,
    taught: dict[str, list[ServedText]],
    judged: dict[str, list[ServedText]],
    begin: Row | None = None,
) -> dict[str, float]:
    """alpha of each domain with a draft trained on it alone, from the weights `begin`."""
    return {
        domain: setting.alpha(trained(setting, seed, some, begin), judged[domain])
        for domain, some in taught.items()
    }


def trained(
    setting: Setting, seed: int, some: Sequence[ServedText], begin: Row | None = None
) -> TrainedDrafter:
    drafter = setting.load(setting.draft(seed))
    if begin is not None:
        drafter.load_state_dict(begin)
    distill(drafter, setting, some, seed=seed)
    return drafter
