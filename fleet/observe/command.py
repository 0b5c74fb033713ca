"""`draftsmith observe`: a reverse proxy that records the traffic of any OpenAI-compatible
server."""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import ExitStack, suppress

import uvicorn

from draftsmith import lock
from draftsmith.chat_answers import ChatAnswers
from draftsmith.client import KEEP_ALIVE_S, base_of
from draftsmith.config import check_limits
from draftsmith.distill.buffer.buffer import BufferWriter
from draftsmith.distill.status import serve_metrics
from draftsmith.errors import UserError
from draftsmith.fleet.config import ObserveConfig
from draftsmith.fleet.observe.exchange import Models, Observer, ProxyCounters
from draftsmith.fleet.observe.proxy import Proxy
from draftsmith.progress import set_up_logging

logger = logging.getLogger("draftsmith.observe")
# What a stopping proxy waits for answers that are passing through.
DRAIN_S = 30


def run(config: ObserveConfig) -> int:
    """Serves until a signal; answers that pass through then are finished first."""
    set_up_logging()
    check_limits(config)
    url = base_of(config.url, "url")
    counters = ProxyCounters()
    with ExitStack() as closing, bind(config.listen) as listener:
        observer = Observer(
            config,
            counters,
            BufferWriter(config.buffer, share=config.share),
            Models(url, config.model, api_key=config.api_key),
            answers_of(config),
        )
        closing.callback(lambda: logger.info("%s", counters.line()))
        closing.callback(observer.close)
        if config.status_port is not None:
            shown = serve_metrics(counters, config.status_host, config.status_port)
            closing.callback(shown.close)
        host, port = listener.getsockname()[:2]
        logger.info("http://%s:%d stands in front of %s", host, port, url)
        proxy = server(Proxy(url, observer))
        # Records are written after the last answer.
        with lock.sigterm_ends(proxy), closing.pop_all(), suppress(KeyboardInterrupt):
            proxy.run(sockets=[listener])
    return 0


class DrainingServer(uvicorn.Server):
    """At its end answers that pass through get `drain_s`; then their connections are closed."""

    drain_s: float = DRAIN_S

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.get_running_loop().call_later(self.drain_s, self._abort)
        await super().shutdown(sockets)
        ending.cancel()

    def _abort(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def server(proxy: Proxy) -> DrainingServer:
    # The server's own headers pass; this one adds none.
    return DrainingServer(
        uvicorn.Config(
            proxy,
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            ws="none",
            timeout_keep_alive=KEEP_ALIVE_S,
            # uvicorn's own end answers with an error of its own.
            timeout_graceful_shutdown=None,
        )
    )


def bind(listen: str) -> socket.socket:
    host, _, port = listen.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise UserError(f"listen is {listen!r}, which is no address; give HOST:PORT")
    return lock.bind(host.strip("[]") or "0.0.0.0", int(port))


def answers_of(config: ObserveConfig) -> ChatAnswers | None:
    """Answers by the target's tokenizer."""
    if not config.target:
        return None
    # transformers takes seconds to load, and nothing else here needs it.
    from draftsmith.drafters.target.load import load_end_ids, load_tokenizer

    trust = config.trust_remote_code
    tokenizer = load_tokenizer(config.target, trust_remote_code=trust)
    return ChatAnswers(tokenizer, load_end_ids(config.target, trust_remote_code=trust))
