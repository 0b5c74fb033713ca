"""Clusters of real text without tags: as many as two halves agree on, and pure enough to give each
a draft."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from draftsmith.distill.pool.clusters import find_clusters
from draftsmith.drafters.pool import DraftPool, PromptClusters, read_pool, write_pool
from draftsmith.prompts.corpus import stdlib_code, stdlib_prose

TOKENS, PROMPT = 96, 48


class Sample(NamedTuple):
    kind: str
    tokens: list[int]


def headers() -> list[str]:
    """C++, of the wheel that is installed anyway."""
    root = Path(torch.__file__).parent / "include" / "torch" / "csrc"
    return [path.read_text(encoding="utf-8", errors="ignore") for path in sorted(root.rglob("*.h"))]


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    kinds = {
        "code": [one.text for one in stdlib_code()],
        "prose": [one.text for one in stdlib_prose()],
        "headers": headers(),
    }
    cut = list(pieces(kinds, random.Random(0), 900))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [text for _, text in cut],
        trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet, show_progress=False),
    )
    return [Sample(kind, tokenizer.encode(text).ids[:TOKENS]) for kind, text in cut]


def pieces(
    kinds: dict[str, list[str]], generator: random.Random, count: int
) -> Iterator[tuple[str, str]]:
    """Beginnings of lines anywhere."""
    for _ in range(count):
        kind = generator.choice(sorted(kinds))
        text = generator.choice([one for one in kinds[kind] if len(one) > 8 * TOKENS])
        begin = text.rfind("\n", 0, generator.randrange(len(text) - 6 * TOKENS)) + 1
        yield kind, text[begin : begin + 8 * TOKENS]


def purity(found: PromptClusters, samples: list[Sample]) -> float:
    """Share of the samples whose cluster is mostly of their kind, by the first tokens alone, as a
    server decides."""
    tables: dict[str, Counter[str]] = {}
    for sample in samples:
        tables.setdefault(found.nearest(sample.tokens[:PROMPT]), Counter())[sample.kind] += 1
    return sum(max(table.values()) for table in tables.values()) / len(samples)


def test_kinds_of_real_text_are_found_and_survive_the_file(
    samples: list[Sample], tmp_path: Path
) -> None:
    seen, new = samples[:450], samples[450:]
    found = find_clusters([sample.tokens for sample in seen], most=6, seed=0)
    assert found is not None and 3 <= len(found.centroids) <= 6
    measured = purity(found, new)
    print(
        f"{len(found.centroids)} clusters, purity {measured:.3f} of unseen prompts of {PROMPT} "
        "tokens, chance 0.33"
    )
    assert measured > 0.8
    shuffled = [
        Sample(other.kind, one.tokens) for one, other in zip(new, new[1:] + new[:1], strict=True)
    ]
    assert purity(found, shuffled) < 0.5
    write_pool(tmp_path, DraftPool(clusters=found))
    pool = read_pool(tmp_path)
    assert pool is not None
    prompts = [sample.tokens[:PROMPT] for sample in new]
    assert sum(pool.class_of("", prompt) != found.nearest(prompt) for prompt in prompts) <= 2


def test_the_same_texts_give_the_same_clusters(samples: list[Sample]) -> None:
    texts = [sample.tokens for sample in samples[:200]]
    first, second = (find_clusters(texts, most=4, seed=3) for _ in range(2))
    assert first is not None and second is not None and (first.centroids == second.centroids).all()


def test_traffic_of_one_kind_has_no_clusters() -> None:
    generator = np.random.default_rng(0)
    words = np.minimum(generator.zipf(1.3, (300, TOKENS)), 4000)
    assert find_clusters(words.tolist(), most=6, seed=0) is None
    assert find_clusters([], most=6, seed=0) is None
    assert find_clusters([[1, 2, 3]] * 50, most=6, seed=0) is None
