"""Pool of drafts that learn from one class of requests each: sorted by tag or cluster, begun,
served, given up (`policy.py`).

Every text also goes to the shared track: its draft serves the other classes, and the drafts of
classes are compared with it.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.distill.buffer.traffic import ServedText
from draftsmith.distill.draft_track import DraftTrack
from draftsmith.distill.gate.class_comparison import ClassComparison
from draftsmith.distill.gate.scoring import Scored
from draftsmith.distill.pool.clusters import find_clusters
from draftsmith.distill.pool.policy import ClassTraffic, PoolMember, PoolMove, moves, resolved
from draftsmith.distill.state import LearnerContext
from draftsmith.drafters import versions
from draftsmith.drafters.pool import (
    DraftPool,
    cluster_name,
    next_folder,
    pool_root,
    read_pool,
    write_pool,
)
from draftsmith.files import restored

# Texts without a tag that are enough to look for clusters in; while no draft goes by clusters, anew
# each time they have doubled.
FIRST_CLUSTERS = 256
# As decisions name them.
DECISIONS = {
    "learn": "class learns",
    "serve": "new class",
    "merge": "merged class",
    "stop": "class stops learning",
    "retire": "retired class",
}


@dataclass
class PooledDraft:
    """Class with a track. While it learns, its live version is a copy of the live draft, which its
    candidate must beat."""

    name: str
    folder: str
    track: DraftTrack
    comparison: ClassComparison
    is_serving: bool
    requests: int = 0  # since it began to learn

    def copied(self, version: int) -> int | None:
        """Version of the live draft that a version of its own is a copy of; None for a candidate
        that won."""
        return versions.read_manifest(self.track.root, version)["data_range"].get("copy_of")

    @property
    def has_won(self) -> bool:
        return not self.is_serving and self.copied(self.track.live.version) is None

    @property
    def compared_with(self) -> int | None:
        """Version of the live draft that its candidate must beat, or did."""
        version = self.track.live.version
        if self.has_won:
            version = versions.read_manifest(self.track.root, version)["parent"]
        return None if version is None else self.copied(version)

    def numbers(self) -> dict[str, Any]:
        latest = self.comparison.latest
        return {
            "folder": self.folder,
            "serving": self.is_serving,
            "version": self.track.live.version,
            "gain": latest.gain if latest else None,
            "requests": self.requests,
            "updates": self.track.learner.updates,
            "window": len(self.track.window),
        }


class ClassPool:
    """Tracks of `pool.json`; their values are in the learner's state."""

    def __init__(self, root: Path, context: LearnerContext, shared: DraftTrack):
        self.root, self.context, self.shared = root, context, shared
        self.written = pool = read_pool(root) or DraftPool()
        self.config, self.gate = (
            resolved(context.config.pool, len(pool.classes) + len(pool.learning)),
            context.config.gate,
        )
        self.clusters = pool.clusters
        self.traffic = ClassTraffic(self.config.idle_requests)
        self.untagged, self.clusters_due = 0, FIRST_CLUSTERS
        self.members: dict[str, PooledDraft] = {}
        for classes, is_serving in ((pool.classes, True), (pool.learning, False)):
            for name, folder in classes.items():
                self.members[name] = self._open(name, folder, is_serving=is_serving)
        self._sweep()
        if context.config.pool.most is None and self.members:
            names = ", ".join(map(repr, self.members))
            context.report(
                f"the pool goes on with {names}; give pool.most to let more classes begin, or "
                "fewer stay"
            )

    def _open(self, name: str, folder: str, *, is_serving: bool) -> PooledDraft:
        draft = str(versions.folder_of(self.root, self.shared.live.version))
        track = DraftTrack(pool_root(self.root) / folder, self.context, draft=draft, name=name)
        return PooledDraft(name, folder, track, ClassComparison(), is_serving)

    @property
    def tracks(self) -> dict[str, DraftTrack]:
        """Tracks by folder."""
        return {one.folder: one.track for one in self.members.values()}

    def take(self, text: ServedText) -> None:
        tag = text.records[0].request_class
        self.untagged += not tag
        name = DraftPool(clusters=self.clusters).class_of(tag, text.records[0].context)
        self.traffic.observe(name)
        if name in self.members:
            self.members[name].requests += 1
            self.members[name].track.take(text)

    def _find_clusters(self) -> None:
        """Clusters the reservoir of the shared track."""
        names = (
            []
            if self.clusters is None
            else [cluster_name(number) for number in range(len(self.clusters.centroids))]
        )
        if self.untagged < self.clusters_due or any(name in self.members for name in names):
            return
        self.clusters_due = 2 * self.untagged
        kept = self.shared.learner.reservoir.texts
        texts = [text.tokens for text in kept if not text.records[0].request_class]
        self.clusters = find_clusters(
            texts, most=max(2, self.config.most or 2), seed=self.context.config.seed
        )
        self.traffic.leave_out(names)
        count = len(self.clusters.centroids) if self.clusters else 1
        self.context.report(f"requests without a tag are of {count} kind{'s' if count > 1 else ''}")

    def review(self) -> None:
        """Compares classes that have enough new held-out requests, and moves."""
        if not self.config.most and not self.members:
            return
        for one in self.members.values():
            if not one.is_serving:
                self._follow_live(one)
            elif self._num_new(one) >= self.gate.requests:
                with self.context.throttle.work():
                    self._look(one)
        members = [
            self._member(one)
            for one in sorted(self.members.values(), key=lambda one: not one.is_serving)
        ]
        for move in moves(members, self.traffic, self.config):
            self._apply(move)
        self._find_clusters()
        self._write()

    def _follow_live(self, one: PooledDraft) -> None:
        """Rebases a class that learns on today's live draft, which it must beat even if it did beat
        yesterday's."""
        version = self.shared.live.version
        if one.compared_with != version:
            one.track.lifecycle.rebase(self.shared.live.draft, version)

    def _num_new(self, one: PooledDraft) -> int:
        seen = set(one.comparison.window)
        return sum(text.request not in seen for text in one.track.window)

    def _look(self, one: PooledDraft) -> None:
        if one.track.live.made_for or self.shared.live.made_for:
            return
        texts, depth = one.track.window, one.track.depth
        own, live = (
            track.live.scorer.score(texts, max_depth=depth) for track in (one.track, self.shared)
        )
        pair = (one.track.live.version, self.shared.live.version)
        one.comparison.look(
            [text.request for text in texts], alphas(live), alphas(own), self.gate, versions=pair
        )

    def _member(self, one: PooledDraft) -> PoolMember:
        summary = (
            one.comparison.describe() if one.is_serving else f"version {one.track.live.version} won"
        )
        return PoolMember(
            one.name,
            one.is_serving,
            one.has_won,
            one.comparison.is_no_better(self.gate),
            one.requests,
            summary,
        )

    def _apply(self, move: PoolMove) -> None:
        name = move.name
        if move.kind == "learn":
            self.members[name] = self._open(name, next_folder(self.root), is_serving=False)
            self.members[name].track.begin(None)
        one = self.members[name]
        if move.kind == "serve":
            one.is_serving = True
        elif move.kind != "learn":
            del self.members[name]
            self.traffic.given_up[name] = self.traffic.num_seen
        decision = DECISIONS[move.kind]
        self.shared.log.add(
            {"decision": decision, "class": name, "reason": move.reason, **one.numbers()}
        )
        self.context.report(f"{decision}: {name!r} ({one.folder}), {move.reason}")

    def _pool(self) -> DraftPool:
        serving = {one.name: one.folder for one in self.members.values() if one.is_serving}
        learning = {one.name: one.folder for one in self.members.values() if not one.is_serving}
        return DraftPool(serving, learning, self.clusters)

    def _write(self) -> None:
        """Writes `pool.json` where it changed. A full disk is tried again."""
        pool = self._pool()
        if pool == self.written:
            return
        write_pool(self.root, pool)
        self.context.save()
        self.written = pool
        self._sweep()

    def _sweep(self) -> None:
        """Deletes versions of classes without a draft; their decisions stay."""
        named = {one.folder for one in self.members.values()}
        for folder in pool_root(self.root).glob("c*/"):
            if folder.name not in named:
                for version in versions.versions(folder):
                    shutil.rmtree(versions.folder_of(folder, version), ignore_errors=True)

    def numbers(self) -> dict[str, Any]:
        return {one.name: one.numbers() for one in self.members.values()}

    def to_dict(self) -> dict[str, Any]:
        members = {
            one.folder: {"requests": one.requests, "standing": asdict(one.comparison)}
            for one in self.members.values()
        }
        return {
            "traffic": asdict(self.traffic),
            "untagged": self.untagged,
            "clusters_due": self.clusters_due,
            "members": members,
        }

    def restore(self, values: Mapping[str, Any]) -> None:
        traffic: ClassTraffic = restored(ClassTraffic, values["traffic"])
        self.traffic = traffic.widened(self.config.idle_requests)
        self.untagged, self.clusters_due = values["untagged"], values["clusters_due"]
        for one in self.members.values():
            if one.folder in values["members"]:
                saved = values["members"][one.folder]
                one.requests = saved["requests"]
                one.comparison = restored(ClassComparison, saved["standing"])


def alphas(scored: Sequence[Scored]) -> list[np.ndarray]:
    """alpha per text, empty for a text that contradicts this target."""
    return [one.alpha if one.is_consistent else np.zeros(0) for one in scored]
