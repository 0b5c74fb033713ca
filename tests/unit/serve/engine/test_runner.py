from __future__ import annotations

import torch

from draftsmith.serve.engine.runner import BlockTables
from draftsmith.serve.requests.request import Request
from draftsmith.serve.sampling.params import SamplingParams


def make_request(name: str, slot: int, blocks: list[int]) -> Request:
    request = Request(
        id=name, tokens=[1], num_prompt=1, params=SamplingParams(), seed=0, k=0, max_tokens=1
    )
    request.slot, request.blocks = slot, blocks
    return request


def test_tables_grow_with_their_requests() -> None:
    tables = BlockTables(3, 8, torch.device("cpu"))
    first, second = make_request("a", 2, [4]), make_request("b", 0, [5, 9])
    assert tables.of([first]).tolist() == [[4]]
    first.blocks += [7, 1]
    assert tables.of([second, first]).tolist() == [[5, 9, 0], [4, 7, 1]]


def test_a_slot_forgets_the_request_before() -> None:
    tables = BlockTables(1, 8, torch.device("cpu"))
    tables.of([make_request("a", 0, [4, 5, 6])])
    assert tables.of([make_request("b", 0, [7])]).tolist() == [[7]]


def test_a_preempted_request_comes_back_with_its_new_blocks() -> None:
    tables = BlockTables(1, 8, torch.device("cpu"))
    request = make_request("a", 0, [4, 5])
    tables.of([request])
    request.num_preemptions, request.blocks = 1, [8, 9]
    assert tables.of([request]).tolist() == [[8, 9]]
