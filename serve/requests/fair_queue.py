"""Order of admission: start-time fair queueing over classes of requests; within one by priority,
then first come first served. Torch-free."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from draftsmith.serve.requests.request import Request


@dataclass(slots=True)
class _Line:
    """The waiting requests of one class, by priority and then as they came."""

    requests: list[Request] = field(default_factory=list)
    start: float = 0.0  # virtual time at which the turn of the first one starts


class FairQueue:
    """Classes that wait share the admitted tokens evenly, however many requests each has sent.

    Virtual time moves with every admission by that request's tokens over the number of waiting
    classes, so a waiting request is overtaken by a bounded amount of work. Requests that were put
    back are served before all others.
    """

    def __init__(self) -> None:
        self._returned: deque[Request] = deque()
        self._lines: dict[str, _Line] = {}
        self._time = 0.0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        yield from list(self._returned)
        for line in list(self._lines.values()):
            yield from list(line.requests)

    def append(self, request: Request) -> None:
        line = self._lines.setdefault(class_of(request), _Line())
        if not line.requests:
            line.start = max(self._time, line.start)
        insort(line.requests, request, key=lambda one: one.options.priority)
        self._size += 1

    def put_back(self, request: Request) -> None:
        """A preempted request: it has had its turn already and goes on before all others."""
        self._returned.appendleft(request)
        self._size += 1

    def head(self) -> Request:
        return self._returned[0] if self._returned else self._next().requests[0]

    def pop(self) -> Request:
        """Takes out the head."""
        self._size -= 1
        if self._returned:
            return self._returned.popleft()
        line = self._next()
        waiting = sum(bool(other.requests) for other in self._lines.values())
        request = line.requests.pop(0)
        self._time = max(self._time, line.start) + cost_of(request) / waiting
        line.start += cost_of(request)
        # A class without requests that is not ahead of its share is as good as a new one.
        self._lines = {
            name: line
            for name, line in self._lines.items()
            if line.requests or line.start > self._time
        }
        return request

    def remove(self, request: Request) -> bool:
        """Take a request out; False when it was not there."""
        line = self._lines.get(class_of(request), _Line())
        for requests in (self._returned, line.requests):
            if request in requests:
                requests.remove(request)
                self._size -= 1
                return True
        return False

    def _next(self) -> _Line:
        return min(
            (line for line in self._lines.values() if line.requests), key=lambda line: line.start
        )


def class_of(request: Request) -> str:
    """Tenant of the request if the server has one, else the class that the client gave."""
    return request.options.tenant or request.options.request_class


def cost_of(request: Request) -> int:
    """Tokens it may take at most."""
    return request.num_prompt + request.max_tokens
