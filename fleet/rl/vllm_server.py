"""A vLLM server that rolls out, such as `trl vllm-serve` starts it: names of its weights, and
drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftsmith.fleet.log import once

TIMEOUT_S = 60.0


class VllmServer:
    """Routes of one server; nothing is raised, since training goes on without them.

    TRL sends weights and gives them no name. So the name is set where no request runs: after an
    optimizer step, before TRL sends the new weights with its next rollouts.
    """

    def __init__(self, url: str, *, http: Any = None):
        self.url = url.rstrip("/")
        self._http = http

    @property
    def http(self) -> Any:
        """A client with httpx's `post`."""
        if self._http is None:
            import httpx

            self._http = httpx.Client(timeout=TIMEOUT_S)
        return self._http

    def name_weights(self, name: str) -> bool:
        """Name of the weights in records from now on. vLLM has this route in its development mode
        alone, which TRL needs too."""
        return self._post("/update_weight_version", {"new_version": name})

    def swap(self, version: int, folder: Path) -> bool:
        """Draft of an exported folder in place of the served one. The route of draftsmith's plugin,
        with `admin` in its settings, on the server's own machine."""
        return self._post("/draftsmith/swap", {"folder": str(folder), "version": str(version)})

    def _post(self, path: str, body: dict[str, Any]) -> bool:
        try:
            answer = self.http.post(f"{self.url}{path}", json=body)
        except Exception as error:  # of whichever client it is
            once(f"{self.url}{path} cannot be reached ({error})")
            return False
        if answer.status_code >= 300:
            once(f"{self.url}{path} answers {answer.status_code}: {answer.text[:200]}")
            return False
        return True
