"""Order of admission: start-time fair queueing over classes of requests; within one by priority,
then first come first served. Torch-free."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from draftsmith.serve.requests.request import Request


@dataclass(slots=True)
class _Line:
    """The waiting requests of one class, each with the virtual time at which its turn starts."""

    requests: deque[tuple[float, int, Request]] = field(default_factory=deque)
    finish: float = 0.0  # virtual time at which its last one would have been served

    def bring_forward(self) -> None:
        """Place the last request before those with a higher `priority`. The turns of the line
        begin where they did: other classes lose nothing."""
        last = self.requests[-1][2]
        priority = last.options.priority
        later = [waiting.options.priority > priority for _, _, waiting in self.requests]
        if True not in later:
            return
        count = len(later) - later.index(True)
        turns = [self.requests.pop() for _ in range(count)][::-1]
        start = turns[0][0]
        requests = [last, *(request for _, _, request in turns[:-1])]
        for (_, arrived, _), request in zip(turns, requests, strict=True):
            self.requests.append((start, arrived, request))
            start += cost_of(request)


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
        self._num_arrived = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        yield from list(self._returned)
        for line in list(self._lines.values()):
            yield from [request for _, _, request in line.requests]

    def append(self, request: Request) -> None:
        line = self._lines.setdefault(class_of(request), _Line())
        start = max(self._time, line.finish)
        line.requests.append((start, self._num_arrived, request))
        line.finish = start + cost_of(request)
        line.bring_forward()
        self._num_arrived += 1
        self._size += 1

    def put_back(self, request: Request) -> None:
        """A preempted request: it has had its turn already and goes on before all others."""
        self._returned.appendleft(request)
        self._size += 1

    def head(self) -> Request:
        return self._returned[0] if self._returned else self._next().requests[0][2]

    def pop(self) -> Request:
        """Takes out the head."""
        self._size -= 1
        if self._returned:
            return self._returned.popleft()
        line = self._next()
        waiting = sum(bool(other.requests) for other in self._lines.values())
        start, _, request = line.requests.popleft()
        self._time = max(self._time, start) + cost_of(request) / waiting
        # A class without requests that is not ahead of its share is as good as a new one.
        self._lines = {
            name: line
            for name, line in self._lines.items()
            if line.requests or line.finish > self._time
        }
        return request

    def remove(self, request: Request) -> bool:
        """Take a request out; False when it was not there."""
        if request in self._returned:
            self._returned.remove(request)
            self._size -= 1
            return True
        line = self._lines.get(class_of(request))
        entry = (
            next((entry for entry in line.requests if entry[2] is request), None)
            if line is not None
            else None
        )
        if line is None or entry is None:
            return False
        line.requests.remove(entry)
        self._size -= 1
        return True

    def _next(self) -> _Line:
        return min(
            (line for line in self._lines.values() if line.requests),
            key=lambda line: line.requests[0][:2],
        )


def class_of(request: Request) -> str:
    """Tenant of the request if the server has one, else the class that the client gave."""
    return request.options.tenant or request.options.request_class


def cost_of(request: Request) -> int:
    """Tokens it may take at most."""
    return request.num_prompt + request.max_tokens
