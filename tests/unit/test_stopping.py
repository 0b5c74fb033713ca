"""End of a server by a signal that comes before it listens."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import uvicorn

from draftsmith.lock import sigterm_ends


@pytest.mark.timeout(30)
def test_a_signal_before_a_server_listens_ends_it() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        """Answers nothing."""

    server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", log_level="error"))
    with sigterm_ends(server):
        os.kill(os.getpid(), signal.SIGTERM)
        server.run()
    assert server.should_exit
