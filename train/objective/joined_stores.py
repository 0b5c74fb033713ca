"""Stored signals of several data folders, as if one held them. A token's index counts the tokens
of the folders before its own."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import torch

from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.kernels.sampling.top_tokens import TopProbs
from draftsmith.train.data.mixture import Mixture
from draftsmith.train.data.stored_taps import StoredTaps
from draftsmith.train.objective.stored_teacher import (
    DistributionsByToken,
    StatesByToken,
    StoredDistributions,
    open_store,
    source_over,
)
from draftsmith.train.objective.teacher import TargetSource


def mixture_source(target: Target, mixture: Mixture, taps: tuple[int, ...]) -> TargetSource:
    """Source over the folders of a mixture, which must all store the same."""
    paths = [folder.path for folder in mixture.folders]
    records = [corpus.provenance for corpus in mixture.corpora]
    stores = [open_store(target, path, record) for path, record in zip(paths, records)]
    sizes = [record.get("top_logprobs") for record in records]
    if len(set(sizes)) > 1 and isinstance(stores[0], StoredDistributions):
        raise UserError(
            f"the folders {', '.join(map(repr, paths))} store {', '.join(map(str, sizes))} "
            "likeliest tokens; store as many in all, or train with --teacher live"
        )
    return source_over(target, joined(stores, paths, mixture.train.first_tokens), taps)


def joined(
    stores: Sequence[StoredTaps | StoredDistributions],
    paths: Sequence[str],
    first_tokens: Sequence[int],
) -> StatesByToken | DistributionsByToken:
    if len(stores) == 1:
        return stores[0]
    states = [store for store in stores if isinstance(store, StoredTaps)]
    others = [store for store in stores if isinstance(store, StoredDistributions)]
    if states and others:
        raise UserError(
            f"some of the folders {', '.join(map(repr, paths))} store taps and others "
            "distributions; store the same in all, or train with --teacher live"
        )
    if states:
        return JoinedTaps(states, paths, first_tokens)
    return JoinedDistributions(others, first_tokens)


class JoinedTaps:
    def __init__(
        self, stores: Sequence[StoredTaps], paths: Sequence[str], first_tokens: Sequence[int]
    ):
        self.stores, self.first_tokens = stores, first_tokens
        self.taps = stores[0].taps
        for store, path in zip(stores, paths):
            if store.taps != self.taps:
                raise UserError(
                    f"data {path!r} stores taps {', '.join(map(str, store.taps))} and "
                    f"{paths[0]!r} {', '.join(map(str, self.taps))}; store the same in both"
                )

    def read(self, token_index: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        folder = bisect_right(self.first_tokens, token_index) - 1
        return self.stores[folder].read(token_index - self.first_tokens[folder], length)


class JoinedDistributions:
    def __init__(self, stores: Sequence[StoredDistributions], first_tokens: Sequence[int]):
        self.stores, self.first_tokens = stores, torch.tensor(first_tokens)

    def read(self, token_index: torch.Tensor) -> TopProbs:
        wanted = token_index.cpu()
        folders = torch.searchsorted(self.first_tokens, wanted, right=True) - 1
        parts, order = [], []
        for folder in folders.unique().tolist():
            chosen = (folders == folder).nonzero()[:, 0]
            parts.append(self.stores[folder].read(wanted[chosen] - self.first_tokens[folder]))
            order.append(chosen)
        back = torch.cat(order).argsort()
        columns = zip(*parts, strict=True)
        return TopProbs(*(torch.cat(one)[back].to(token_index.device) for one in columns))
