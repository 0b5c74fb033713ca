"""Several data folders as one: their texts one after another, each folder with its weight and its
own held-out part."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.utils.data

from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.train.data.dataset import (
    Corpus,
    Sequences,
    TokenSequence,
    check_tokenizer,
    read_corpus,
)
from draftsmith.train.data.folders import DataFolder, FolderPart, folders_of


class Mixed(torch.utils.data.ConcatDataset):
    """Texts of several folders."""

    def __init__(self, sequences: Sequence[Sequences], weights: Sequence[float]):
        super().__init__(sequences)
        self.parts = [FolderPart(len(one), weight) for one, weight in zip(sequences, weights)]
        self.lengths: np.ndarray = np.concatenate([one.lengths for one in sequences])

    def __getitems__(self, batch: list[list[int]]) -> list[list[TokenSequence]]:
        """Sequences of each row of a batch, as a `DataLoader` asks for them."""
        return [[self[at] for at in row] for row in batch]

    def first(self, count: int) -> list[TokenSequence]:
        """The first texts of every folder, in turns."""
        turns = sorted(
            (at, folder)
            for folder, part in enumerate(self.parts)
            for at in range(min(count, part.size))
        )
        return [self.datasets[folder][at] for at, folder in turns[:count]]


@dataclass(frozen=True)
class Mixture:
    """Data folders read whole. A prompt that any folder holds out is trained on in none."""

    folders: list[DataFolder]
    corpora: list[Corpus]  # of each folder

    @cached_property
    def train(self) -> Mixed:
        return self._mixed([corpus.train for corpus in self.corpora])

    @cached_property
    def held_out(self) -> Mixed:
        return self._mixed([corpus.held_out for corpus in self.corpora])

    def _mixed(self, sequences: Sequence[Sequences]) -> Mixed:
        first_token = 0
        for number, one in enumerate(sequences):
            one.folder, one.first_token = number, first_token
            first_token += one.pieces.num_tokens
        return Mixed(sequences, [folder.weight for folder in self.folders])

    @property
    def long(self) -> int:
        return sum(corpus.long for corpus in self.corpora)

    def token_counts(self, vocab_size: int) -> torch.Tensor:
        """[V] how often the target wrote each token in an epoch of the training part."""
        counts = [corpus.token_counts(vocab_size) for corpus in self.corpora]
        if len({folder.weight for folder in self.folders}) == 1:
            return torch.stack(counts).sum(dim=0)
        weighted = [one * folder.weight for folder, one in zip(self.folders, counts)]
        return torch.stack(weighted).sum(dim=0)

    def provenance(self) -> dict[str, Any]:
        """Record of the data: the provenance of the one folder, or of each of several."""
        if len(self.folders) == 1:
            return self.corpora[0].provenance
        return {"folders": [corpus.provenance for corpus in self.corpora]}

    def record(self) -> list[dict[str, Any]]:
        """Texts and tokens per epoch of each folder."""
        return [
            {
                "folder": folder.path,
                "weight": folder.weight,
                "sequences": len(corpus.train),
                "held_out_sequences": len(corpus.held_out),
                "share_of_tokens": round(share, 4),
            }
            for folder, corpus, share in zip(self.folders, self.corpora, self.shares())
        ]

    def tokens_per_epoch(self) -> int:
        return round(sum(self._tokens()))

    def shares(self) -> list[float]:
        """Share of each folder in the tokens of an epoch."""
        tokens = self._tokens()
        return [one / max(1.0, sum(tokens)) for one in tokens]

    def _tokens(self) -> list[float]:
        """Tokens of each folder per epoch."""
        return [
            folder.weight * float(corpus.train.lengths.sum())
            for folder, corpus in zip(self.folders, self.corpora)
        ]


def provenances(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Provenance of each folder of a `Mixture.provenance`."""
    return record.get("folders", [record])


def read_mixture(
    data: str | Sequence[str],
    target: Target,
    *,
    max_length: int,
    held_out_share: float,
    split_long: bool = False,
) -> Mixture:
    """Opens and checks every folder of an option `data`."""
    folders = folders_of(data)
    if not folders:
        raise UserError("option 'data' names no folder; give --data FOLDER")
    corpora = []
    for folder in folders:
        corpus = read_corpus(
            folder.path,
            max_length=max_length,
            vocab_size=target.vocab_size,
            held_out_share=held_out_share,
            split_long=split_long,
        )
        check_tokenizer(corpus.provenance, target, folder.path)
        corpora.append(corpus)
    if len(corpora) > 1:
        corpora = _without_held_out(folders, corpora)
    _check_weights(folders, corpora)
    return Mixture(folders, corpora)


def _check_weights(folders: Sequence[DataFolder], corpora: Sequence[Corpus]) -> None:
    for folder, corpus in zip(folders, corpora):
        if 0 < len(corpus.train) * folder.weight < 1:
            raise UserError(
                f"option 'data' gives {folder.path!r} the weight {folder.weight:g}, less than one "
                f"of its {len(corpus.train)} texts per epoch; raise it"
            )


def _without_held_out(folders: Sequence[DataFolder], corpora: Sequence[Corpus]) -> list[Corpus]:
    """Corpora without the training texts of prompts that another folder holds out."""
    held_out = {
        corpus.train.pieces.names[at] for corpus in corpora for at in corpus.held_out.indices
    }
    kept = []
    for folder, corpus in zip(folders, corpora):
        train = corpus.train
        chosen = [at for at in train.indices if train.pieces.names[at] not in held_out]
        if len(train) and not chosen:
            raise UserError(
                f"every prompt of {folder.path!r} is held out in another folder of option 'data'; "
                "generate them with one --held-out"
            )
        indices = np.array(chosen, dtype=np.int64)
        kept.append(replace(corpus, train=Sequences(train.rows, indices, train.pieces)))
    return kept


def describe(mixture: Mixture) -> None:
    """Prints what each of several folders gives to an epoch, to standard error."""
    if len(mixture.folders) == 1:
        return
    for entry in mixture.record():
        print(
            f"{entry['folder']!r}, weight {entry['weight']:g}: {entry['sequences']} sequences, "
            f"{entry['share_of_tokens']:.0%} of the tokens per epoch",
            file=sys.stderr,
        )
