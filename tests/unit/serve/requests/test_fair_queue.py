from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import example, given, settings
from hypothesis import strategies as st

from draftsmith.serve.requests.fair_queue import FairQueue, cost_of
from draftsmith.serve.requests.request import Request, RequestOptions
from draftsmith.serve.sampling.params import SamplingParams


def make_request(
    kind: str, prompt: int = 10, max_tokens: int = 10, *, tenant: str = "", priority: int = 0
) -> Request:
    return Request(
        id=f"{kind}{tenant}",
        tokens=[7] * prompt,
        num_prompt=prompt,
        params=SamplingParams(),
        seed=0,
        k=0,
        max_tokens=max_tokens,
        options=RequestOptions(request_class=kind, tenant=tenant, priority=priority),
    )


def fill(queue: FairQueue, *kinds: str) -> list[Request]:
    requests = [make_request(kind) for kind in kinds]
    for request in requests:
        queue.append(request)
    return requests


def drain(queue: FairQueue) -> str:
    return "".join(queue.pop().options.request_class for _ in range(len(queue)))


def test_a_class_that_comes_late_does_not_wait_for_all_of_a_flood() -> None:
    queue = FairQueue()
    fill(queue, *"aaaaaaaa")
    assert queue.pop().options.request_class == "a"
    fill(queue, "b", "b")
    assert drain(queue).startswith(("bab", "abab"))


def test_classes_share_by_tokens_and_not_by_requests() -> None:
    queue = FairQueue()
    for _ in range(40):
        queue.append(make_request("small", 5, 5))
        queue.append(make_request("large", 20, 20))
    tokens: Counter[str] = Counter()
    for _ in range(40):
        request = queue.pop()
        tokens[request.options.request_class] += cost_of(request)
    assert abs(tokens["small"] - tokens["large"]) <= 40


def test_a_tenant_is_one_class_whatever_it_calls_its_requests() -> None:
    queue = FairQueue()
    for kind in "abcd":
        queue.append(make_request(kind, tenant="greedy"))
    queue.append(make_request("e", tenant="other"))
    assert "e" in [queue.pop().options.request_class for _ in range(2)]


@settings(max_examples=150, deadline=None)
@given(
    events=st.lists(
        st.tuples(
            st.sampled_from(["append", "append", "append", "pop", "remove", "put back"]),
            st.integers(0, 4),
            st.integers(1, 9),
        )
    )
)
def test_nobody_is_lost_doubled_or_overtaken_within_its_class(
    events: list[tuple[str, int, int]],
) -> None:
    queue, waiting, popped = FairQueue(), [], []
    for event, kind, size in events:
        if event == "append":
            request = make_request(str(kind), size, size)
            queue.append(request)
            waiting.append(request)
        elif event == "pop" and waiting:
            head = queue.head()
            request = queue.pop()
            assert request is head
            same = [
                other
                for other in waiting
                if other.options.request_class == request.options.request_class
            ]
            assert request in popped or request is next(
                other for other in same if other not in popped
            )
            waiting.remove(request)
            popped.append(request)
        elif event == "remove" and waiting:
            request = waiting.pop(size % len(waiting))
            assert queue.remove(request) and not queue.remove(request)
        elif event == "put back" and popped and popped[-1] not in waiting:
            queue.put_back(popped[-1])
            waiting.append(popped[-1])
        assert len(queue) == len(waiting) and {id(request) for request in queue} == {
            id(request) for request in waiting
        }


@settings(max_examples=50, deadline=None)
@given(
    flood=st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 30)), min_size=1, max_size=60),
    most=st.integers(2, 40),
)
@example(flood=[(kind, 1) for kind in range(60)], most=40)
def test_the_work_before_a_waiting_request_is_bounded(
    flood: list[tuple[int, int]], most: int
) -> None:
    """Of a queue that holds `most` requests, as a server's does, under a flood without end.

    Virtual time passes the patient request's start when the work that its class had before was
    done `most` times at the latest; then only those that wait already go before it.
    """
    queue = FairQueue()
    fill(queue, "b")
    patient = fill(queue, "b")[0]
    largest = max(2 * size for _, size in flood)
    bound, work = most * (cost_of(patient) + max(largest, cost_of(patient))), 0
    for number, (kind, size) in enumerate(itertools.cycle(flood)):
        for name in ("new", "newer"):
            if len(queue) < most:
                lap = number // len(flood)
                queue.append(make_request(f"{name} {kind} {lap}", size, size))
        request = queue.pop()
        if request is patient:
            return
        work += cost_of(request)
        assert work <= bound


def test_priority_orders_a_class_and_takes_nothing_from_others() -> None:
    queue = FairQueue()
    plain = fill(queue, *"aabab")
    low, first, second = (make_request("a", priority=priority) for priority in (1, -2, -1))
    for request in (low, second, first):
        queue.append(request)
    order = [queue.pop() for _ in range(len(queue))]
    own = [request for request in order if request.options.request_class == "a"]
    assert own == [first, second, plain[0], plain[1], plain[3], low]
    # By turns, as without priorities.
    assert [request.options.request_class for request in order[:4]] == ["a", "b", "a", "b"]
