"""Recorder in one scheduler of SGLang: what is known before and after each verification goes into
the ring.

The target's logits are reduced before verification, which adds penalties to them in place. What a
step leaves on the accelerator is copied without waiting and sent at the next step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from draftsmith.fleet.recording.reduction import MOST_ROWS, Arrays, reduce, to_host
from draftsmith.fleet.recording.requests import Chooser
from draftsmith.fleet.sglang.requests import Tracked, extra_of, is_recordable, meta_of
from draftsmith.fleet.sglang.trees import Path, Tree, path_of
from draftsmith.fleet.wire.child import Child
from draftsmith.fleet.wire.messages import Kind, StepMeta, meta_array
from draftsmith.shared_memory.arrays import send


@dataclass
class Step:
    """One verification: requests r that are recorded, nodes N of each tree."""

    number: int
    tracked: list[Tracked]
    chosen: torch.Tensor  # [r] their places in the batch
    logged: bool  # p of all nodes is in `p`
    tree: Arrays  # tokens, places, first children, siblings [r, N], lengths [r]
    p: Arrays
    q: Arrays | None = None
    result: Arrays | None = None
    known: list[list[int]] = field(default_factory=list)  # answers so far, by the scheduler


class Recorder:
    """Args:

    version: of the draft, until `version` is set to another
    most: share of new requests that are recorded
    """

    def __init__(self, child: Child, *, version: str, most: float):
        self.child, self.version = child, version
        self.chooser = Chooser(most)
        self.tracked: dict[str, Tracked] = {}
        self.steps: deque[Step] = deque()
        self.handles = self.number = self.generation = 0
        self.dropped = self.text_only = 0

    def before(self, verify_input: Any, batch: Any, logits_output: Any) -> Step | None:
        """Called before a verification; None where nothing of it is recorded."""
        self.flush()
        if self.generation != self.child.generation or not self.child.alive:
            self.dropped += len(self.tracked)
            self.tracked.clear()
            self.generation = self.child.generation
        self._end([one for one in self.tracked.values() if one.request.finished()])
        if batch.forward_mode.is_idle() or not self.child.alive:
            return None
        nodes = int(verify_input.draft_token_num)
        places, tracked = [], []
        for place, req in enumerate(batch.reqs):
            found = self.tracked.get(str(req.rid)) or self._begin(req)
            if found is not None:
                places.append(place)
                tracked.append(found)
        if not tracked:
            return None
        return self._step(verify_input, batch, logits_output, places, tracked, nodes)

    def after(
        self, step: Step, predict: torch.Tensor, lengths: torch.Tensor, index: torch.Tensor
    ) -> None:
        """Called with the result of `eagle_sample`: tokens behind the accepted nodes, how many, and
        their rows."""
        values = [predict, lengths[step.chosen], index[step.chosen]]
        step.result = to_host([value.int() for value in values])
        self.steps.append(step)
        if not predict.is_cuda:
            self.flush()

    def flush(self) -> None:
        """Sends the steps whose results are there."""
        while self.steps:
            self._send_step(self.steps.popleft())

    def drop_all(self) -> None:
        self.steps.clear()
        self.dropped += len(self.tracked)
        self._end(list(self.tracked.values()))

    def close(self) -> None:
        self.flush()
        self._end(list(self.tracked.values()))
        self.child.close()

    # Requests.

    def _begin(self, req: Any) -> Tracked | None:
        ring = self.child.ring
        if req.finished() or not is_recordable(req) or ring.used > ring.capacity // 2:
            return None
        share = self.chooser.share(extra_of(req), ring.share)
        if share <= 0:
            return None
        prompt = list(req.origin_input_ids)
        meta = meta_of(req, share)
        self.handles += 1
        if not self._send(Kind.BEGIN, self.handles, [meta_array(meta), _ints(prompt)]):
            return None
        made = Tracked(self.handles, req, meta.temperature, len(prompt))
        self.tracked[meta.id] = made
        return made

    def _end(self, ended: Sequence[Tracked]) -> None:
        for one in ended:
            self.tracked.pop(str(one.request.rid), None)
        if ended:
            self._send(Kind.END, 0, [_ints([one.handle for one in ended])])

    # Steps.

    def _step(
        self,
        verify_input: Any,
        batch: Any,
        logits_output: Any,
        places: list[int],
        tracked: list[Tracked],
        nodes: int,
    ) -> Step:
        logits = logits_output.next_token_logits
        chosen = torch.tensor(places, device=logits.device)
        tokens = verify_input.draft_token.reshape(-1, nodes)[chosen]
        first = verify_input.retrieve_next_token[chosen]
        tree = [tokens, verify_input.retrieve_index[chosen], first]
        tree += [verify_input.retrieve_next_sibling[chosen], batch.seq_lens[chosen]]
        is_logged = len(places) * nodes <= MOST_ROWS
        p: Arrays = list
        if is_logged:
            rows = (chosen[:, None] * nodes + torch.arange(nodes, device=chosen.device)).flatten()
            following = tokens.gather(1, first.clamp(min=0).long()).flatten()
            temperatures = [one.temperature for one in tracked for _ in range(nodes)]
            p = reduce(lambda at: logits[rows[at]], following, temperatures)
        self.number += 1
        return Step(
            self.number,
            tracked,
            chosen,
            is_logged,
            to_host([value.int() for value in tree]),
            p,
            self._drawn_from(verify_input, chosen, tokens) if is_logged else None,
            known=[list(one.request.output_ids) for one in tracked],
        )

    def _drawn_from(
        self, verify_input: Any, chosen: torch.Tensor, tokens: torch.Tensor
    ) -> Arrays | None:
        """q of each step of a chain, under rejection sampling; else None."""
        probs = verify_input.draft_probs
        if probs is None:
            return None
        steps = probs.shape[1]
        flat = probs[chosen].flatten(0, 1)
        drafted = tokens[:, 1 : steps + 1].flatten()
        return reduce(lambda at: flat[at].log(), drafted, [1.0] * len(drafted))

    def _send_step(self, step: Step) -> None:
        assert step.result is not None
        *trees, lengths = step.tree()
        predict, counts, index = step.result()
        p, q = step.p(), step.q() if step.q is not None else None
        handles, paths, rows = [], [], []
        for number, one in enumerate(step.tracked):
            if self.tracked.get(str(one.request.rid)) is not one:
                continue
            tree = Tree(*(array[number] for array in trees))
            known = [*step.known[number]]
            if not self._catch_up(one, int(lengths[number]), int(tree.tokens[0]), known):
                self._end([one])
                self.dropped += 1
                continue
            path = path_of(tree, predict, index[number][: int(counts[number])])
            handles.append(one)
            paths.append(path)
            rows.append(number)
        if not handles:
            return
        if step.logged and any(path.drafted for path in paths):
            self._send_positions(step, handles, paths, rows, p, q)
        committed = [path.committed for path in paths]
        arrays = [_ints([one.handle for one in handles]), _ints([len(one) for one in committed])]
        arrays.append(_ints([token for tokens in committed for token in tokens]))
        if not self._send(Kind.TOKENS, step.number, arrays):
            self._end(handles)
            return
        for one, tokens in zip(handles, committed):
            one.length += len(tokens)

    def _catch_up(self, one: Tracked, cached: int, root: int, known: list[int]) -> bool:
        """Sends what was generated without a verification: the token of the prompt's own pass, or
        an answer begun before. `cached` tokens stand before the root. False where the text is
        not known."""
        missing = cached + 1 - one.length
        if missing == 0:
            return True
        begun = one.length - len(one.request.origin_input_ids)
        tokens = [*known[begun : begun + missing - 1], root] if missing > 0 else []
        if missing < 0 or len(tokens) != missing:
            return False
        self.number += 1
        arrays = [_ints([one.handle]), _ints([missing]), _ints(tokens)]
        one.length += missing
        return self._send(Kind.TOKENS, -self.number, arrays)

    def _send_positions(
        self,
        step: Step,
        handles: list[Tracked],
        paths: list[Path],
        rows: list[int],
        p: list[np.ndarray],
        q: list[np.ndarray] | None,
    ) -> None:
        nodes = len(p[0]) // len(step.tracked)
        at = [row * nodes + parent for row, path in zip(rows, paths) for parent in path.parents]
        drafted = _ints([token for path in paths for token in path.drafted])
        ids, logprobs, rest = (array[at] for array in p)
        rest = with_drafted(ids, logprobs, rest, drafted)
        arrays = [
            meta_array(StepMeta(self.version, "")),
            _ints([one.handle for one in handles]),
            _ints([len(path.drafted) for path in paths]),
            drafted,
            ids, logprobs, rest,
        ]  # fmt: skip
        if q is None:
            arrays += of_siblings([one for path in paths for one in path.siblings])
        else:
            steps = len(q[0]) // len(step.tracked)
            depth = [
                row * steps + d for row, path in zip(rows, paths) for d in range(len(path.drafted))
            ]
            arrays += [array[depth] for array in q]
        if not self._send(Kind.POSITIONS, step.number, arrays):
            self.text_only += 1

    def _send(self, kind: Kind, number: int, arrays: Sequence[np.ndarray]) -> bool:
        return send(self.child.ring, kind, number, arrays)


def with_drafted(
    ids: np.ndarray, logprobs: np.ndarray, rest: np.ndarray, drafted: np.ndarray
) -> np.ndarray:
    """`rest` with the logprobs of `drafted`, as far as they are known: a node was reduced with its
    first child, and a sibling of that may have been kept."""
    listed = ids == drafted[:, None]
    found = np.where(listed.any(1), np.where(listed, logprobs, 0).sum(1), np.nan)
    return np.column_stack([rest[:, :2], found]).astype(np.float32)


def of_siblings(siblings: list[list[int]]) -> list[np.ndarray]:
    """q of drafts that verification takes without their probabilities: the siblings, alike."""
    width = max(map(len, siblings), default=1)
    ids = np.zeros((len(siblings), width), np.int32)
    logprobs = np.full((len(siblings), width), -np.inf, np.float32)
    for row, tokens in enumerate(siblings):
        ids[row, : len(tokens)] = tokens
        logprobs[row, : len(tokens)] = -np.log(len(tokens))
    return [ids, logprobs, np.zeros((len(siblings), 3), np.float32)]


def _ints(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)
