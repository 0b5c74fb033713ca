"""Grammar of the texts that a request allows, as a plain value, and its trial in a process of its
own; `grammar_matcher.py` makes it a mask over tokens.

How deep the library recurses, how long it takes and how much it allocates is up to the client's
text: what ends that process is never compiled in this one. Torch-free; the process runs this
module.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import reprlib
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from draftsmith.errors import UserError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer


# JSON as chat templates write it: any space between its parts would let a model go on with space
# for ever.
WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
Kind = Literal["json_schema", "regex", "lark", "combined"]
CPU_S = 2.0
STACK_BYTES = 2**21  # a quarter of what threads of this process have
MEMORY_BYTES = 2**27
NUM_TOKENS = 32  # of a text that is walked
PATIENCE_S = 60.0  # of a machine that has no time for the trial
PART = re.compile(r"@(\w+)")  # the name of a part in the rules of a combined grammar
STARTED, FITS = b".", b"+"


@dataclass(frozen=True)
class Grammar:
    """The answer's whole text, without its end-of-sequence token, is one that `source`
    describes."""

    kind: Kind
    source: str

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any]) -> Grammar:
        """JSON that is valid under `schema`, written as chat templates write it unless the schema's
        own `x-guidance` says otherwise; objects have their properties in the schema's order."""
        own = schema.get("x-guidance", {})
        written = WRITTEN | own if isinstance(own, dict) else own
        return cls("json_schema", json.dumps({**schema, "x-guidance": written}))

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that `pattern` matches from beginning to end (Rust's syntax: no look-around, no
        back-references)."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """One of `texts`."""
        if not texts or "" in texts:
            raise UserError(
                f"grammar is a choice between {reprlib.repr(list(texts))}; give at least one text, "
                "none of them empty"
            )
        # One terminal: as a rule each text would be an item of the parser, which takes 2,000.
        return cls("lark", "start: TEXT\nTEXT: " + " | ".join(json.dumps(text) for text in texts))

    @classmethod
    def lark(cls, source: str) -> Grammar:
        """A context-free grammar in Lark's syntax, as llguidance reads it; its rule is `start`."""
        return cls("lark", source)

    @classmethod
    def combined(cls, rules: str, parts: Mapping[str, Grammar]) -> Grammar:
        """Rules in Lark's syntax that name other grammars: `@answer` is a text of
        `parts["answer"]`."""
        named = {name: [part.kind, part.source] for name, part in parts.items()}
        return cls("combined", json.dumps([rules, named]))


class Unfit(ValueError):
    """A grammar that the library cannot honour, with its reason."""


def compiled(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """The grammar at the beginning of its text; raises `Unfit`."""
    from llguidance import LLMatcher

    try:
        source = json.dumps({"grammars": _listed(grammar.kind, grammar.source)})
    except ValueError as error:
        raise Unfit(str(error)) from error
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=_limits())
    # A warning is a part of the grammar that would be ignored.
    for complaint in (matcher.get_error(), *matcher.get_grammar_warnings()):
        if complaint:
            raise Unfit(complaint)
    # The first mask may be the dearest. It is kept in all copies.
    matcher.compute_bitmask()
    if failure := matcher.get_error():
        raise Unfit("it allows no text" if failure.startswith("NoExtension") else failure)
    return matcher


def _listed(kind: str, source: str, name: str = "start") -> list[dict[str, Any]]:
    """The library's form of a grammar, the one called `name` and then what it is combined of.
    Names of parts begin with that of the whole, so that none means two grammars."""
    from llguidance import LLMatcher

    if kind == "json_schema":
        parts = json.loads(LLMatcher.grammar_from_json_schema(source))["grammars"]
    elif kind == "regex":
        parts = json.loads(LLMatcher.grammar_from_regex(source))["grammars"]
    elif kind == "lark":
        parts = [{"lark_grammar": source}]
    else:
        rules, named = json.loads(source)
        parts = [{"lark_grammar": PART.sub(lambda part: f"@{name}_{part[1]}", rules)}]
        for one, (one_kind, one_source) in named.items():
            parts += _listed(one_kind, one_source, f"{name}_{one}")
    return [{**parts[0], "name": name}, *parts[1:]]


def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    # Half of the library's own step and a fifth of its states: a mask stays below a tenth of a
    # second, and a grammar that is matched below 100 MB.
    return LLParserLimits(step_lexer_fuel=100_000, max_lexer_states=50_000, verbose_errors=False)


class GrammarTrials:
    """A process that has the tokenizer and forks for each trial. Callable from any thread."""

    def __init__(self, tokenizer: str, vocab_size: int, end: int):
        self._setup = json.dumps([tokenizer, vocab_size, end])
        self._lock = threading.Lock()
        self._control, self._stop = self._start()

    def check(self, grammar: Grammar) -> None:
        """Raises `Unfit` for a grammar that ends its trial early, or that the library refuses."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                self._hand_over(theirs)
            answer = _answer(ours, json.dumps([grammar.kind, grammar.source]).encode())
        if not answer.startswith(STARTED):
            raise RuntimeError("the process that tries grammars does not run")
        verdict = answer.removeprefix(STARTED)
        if not verdict:
            raise Unfit(
                f"it is nested too deeply, or takes more than {CPU_S:g} s or "
                f"{MEMORY_BYTES >> 20} MiB"
            )
        if verdict != FITS:
            raise Unfit(verdict.decode())

    def _hand_over(self, link: socket.socket) -> None:
        with self._lock:
            try:
                socket.send_fds(self._control, [STARTED], [link.fileno()])
            except OSError:  # it was killed
                self._stop()
                self._control, self._stop = self._start()
                socket.send_fds(self._control, [STARTED], [link.fileno()])

    def _start(self) -> tuple[socket.socket, weakref.finalize[..., GrammarTrials]]:
        control, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile() as setup:
            setup.write(self._setup.encode())
            setup.flush()
            process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
            setup.seek(0)
            socket.send_fds(control, [STARTED], [setup.fileno()])
        return control, weakref.finalize(self, _end, control, process)


def _end(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    control.close()
    process.kill()
    process.wait()


def _answer(link: socket.socket, question: bytes) -> bytes:
    """Bytes that came before the other end was closed."""
    link.settimeout(PATIENCE_S)
    answer = b""
    with contextlib.suppress(OSError):
        link.sendall(question)
        link.shutdown(socket.SHUT_WR)
        while piece := link.recv(65536):
            answer += piece
    return answer


def serve(control: socket.socket) -> None:
    """Forks for each descriptor that comes, until the other end is closed. The first one is of the
    file with the tokenizer."""
    from llguidance import LLTokenizer

    with open(socket.recv_fds(control, 1, 1)[1][0]) as file:
        text, vocab_size, end = json.load(file)
    tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=end)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for the trials
    os.nice(10)
    while links := socket.recv_fds(control, 1, 1)[1]:
        if os.fork() == 0:
            control.close()
            with socket.socket(fileno=links[0]) as opened:
                _try(opened, tokenizer)
            os._exit(0)
        os.close(links[0])


def _try(link: socket.socket, tokenizer: LLTokenizer) -> None:
    link.sendall(STARTED)
    with link.makefile("rb") as file:
        kind, source = json.load(file)
    _bound()
    verdict = [b""]

    def walk() -> None:
        try:
            _walk(compiled(tokenizer, Grammar(kind, source)))
            verdict[0] = FITS
        except Unfit as error:
            verdict[0] = str(error).encode()
        except BaseException as error:  # the library's panics are no `Exception`
            verdict[0] = repr(error).encode()

    threading.stack_size(STACK_BYTES)
    # All that it made is gone behind it too: that is as deep.
    thread = threading.Thread(target=walk)
    thread.start()
    thread.join()
    link.sendall(verdict[0])


def _bound() -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which ends the process
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open("/proc/self/statm") as file:
        most = int(file.read().split()[5]) * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _walk(matcher: LLMatcher) -> None:
    """Any text of the grammar, as far as it goes: what is deep or slow may lie behind its
    beginning. What the library fails on behind the first token it fails on in any text."""
    generator = random.Random(0)
    for number in range(NUM_TOKENS):
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        if number == 1 and (failure := matcher.get_error()):
            raise Unfit(failure)
        if matcher.is_error() or not allowed:
            return
        later = allowed >> generator.randrange(allowed.bit_length())
        token = allowed.bit_length() - later.bit_length() + (later & -later).bit_length() - 1
        matcher.consume_token(token)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with the process that it tries for
    with socket.socket(fileno=0) as _control:
        serve(_control)
