"""`from draftsmith import Engine`: the engine the server runs, behind plain calls."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import draftsmith
from draftsmith import Engine, SamplingParams
from draftsmith.drafters import checkpoint
from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.options import Eagle3Options
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.text.suffix import Suffix
from draftsmith.errors import UserError
from draftsmith.serve.requests.request import FinishReason
from tests.waiting import wait_until

CAPTURED = True
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
README = Path(__file__).parents[2] / "README.md"


@pytest.fixture(scope="module")
def engine(target_folder: str) -> Iterator[Engine]:
    with Engine(target_folder, draft=Suffix(), max_queue=4, k=3, compile="off") as engine:
        yield engine


def test_text_and_token_ids_alone_and_in_lists(engine: Engine) -> None:
    ids = engine.target.tokenizer()("def draft(")["input_ids"]
    forms = ["def draft(", ["def draft("], ids, [ids]]
    completions = [engine.generate(form, GREEDY) for form in forms]
    assert [len(found) for found in completions] == [1, 1, 1, 1]
    assert len({completion.text for (completion,) in completions}) == 1
    (answer,) = engine.target.answer([ids], max_new_tokens=12, ignore_eos=True)
    assert completions[0][0].tokens == answer


def test_more_prompts_than_the_queue_holds_come_back_in_order(engine: Engine) -> None:
    prompts = [[5 + i, 9, 7] for i in range(15)]
    completions = engine.generate(prompts, GREEDY)
    assert [completion.prompt for completion in completions] == prompts
    assert [completion.tokens for completion in completions] == engine.target.answer(
        prompts, max_new_tokens=12, ignore_eos=True
    )


def test_each_prompt_may_have_its_own_params(engine: Engine) -> None:
    params = [SamplingParams(max_tokens=n, ignore_eos=True, seed=1) for n in (2, 5)]
    assert [len(completion.tokens) for completion in engine.generate([[5], [6]], params)] == [2, 5]
    with pytest.raises(UserError, match="2 prompts are given with 1 params"):
        engine.generate([[5], [6]], params[:1])
    with pytest.raises(UserError, match=r"params are {'seed': 1}; give draftsmith.SamplingParams"):
        engine.generate([[5]], {"seed": 1})


def test_updates_stream_and_add_up(engine: Engine) -> None:
    stream = engine.stream("import os", GREEDY)
    updates = list(stream)
    (whole,) = engine.generate("import os", GREEDY)
    assert "".join(update.text for update in updates) == whole.text
    assert [update.finish_reason for update in updates][-1] is FinishReason.LENGTH
    assert stream.result().tokens == [token for update in updates for token in update.tokens]


def test_leaving_a_stream_cancels_its_request(engine: Engine) -> None:
    for stop in (lambda stream: next(iter(stream)), lambda stream: stream.close()):
        stream = engine.stream([5, 6], SamplingParams(max_tokens=200, ignore_eos=True))
        stop(stream)
        stream.close()
        while not stream.request.finished:
            pass
        assert stream.request.finish_reason is FinishReason.ABORT
        assert stream.request.num_output < 200


def test_coroutines_share_the_engine(engine: Engine) -> None:
    async def text(prompt: str) -> str:
        return "".join([update.text async for update in engine.stream(prompt, GREEDY)])

    async def both() -> tuple[list[str], list[str]]:
        streamed = await asyncio.gather(text("import os"), text("for name in"))
        whole = await engine.generate_async(["import os", "for name in"], GREEDY)
        return list(streamed), [completion.text for completion in whole]

    streamed, whole = asyncio.run(both())
    found = engine.generate(["import os", "for name in"], GREEDY)
    assert streamed == whole == [completion.text for completion in found]


def test_what_cannot_be_honoured_is_refused(engine: Engine) -> None:
    with pytest.raises(UserError, match="empty"):
        engine.generate([[5], []], GREEDY)
    with pytest.raises(UserError, match="leave"):
        engine.generate("x", SamplingParams(max_tokens=10_000))
    for wrong in (None, 5, torch.tensor([[5, 6]])):
        with pytest.raises(UserError, match=r"prompt is .*; give a text, token ids or a list"):
            engine.generate(wrong, GREEDY)
    with pytest.raises(UserError, match="a stream is of one prompt"):
        engine.stream(["a", "b"], GREEDY)
    assert engine.generate([[5]], GREEDY)[0].finish_reason is FinishReason.LENGTH


CHAT = [{"role": "user", "content": "def draft("}]


def test_a_chat_is_prompted_as_the_server_prompts_it(engine: Engine) -> None:
    tokenizer = engine.target.tokenizer()
    turns = [*CHAT, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "go"}]
    (alone,) = engine.chat(CHAT, GREEDY)
    both = engine.chat([CHAT, turns], GREEDY)
    for one, chat in zip(both, (CHAT, turns), strict=True):
        asked = {"add_generation_prompt": True, "return_dict": False}
        assert one.prompt == tokenizer.apply_chat_template(chat, **asked)
    assert both[0].tokens == alone.tokens == engine.generate([alone.prompt], GREEDY)[0].tokens
    (continued,) = engine.chat(turns[:2], GREEDY, continue_final_message=True)
    assert tokenizer.decode(continued.prompt).endswith("<assistant>ok")


def test_chats_and_prompts_are_told_apart(engine: Engine) -> None:
    for chat in (CHAT, [CHAT, CHAT]):
        with pytest.raises(UserError, match=r"messages of a chat; give them to Engine\.chat"):
            engine.generate(chat, GREEDY)
    with pytest.raises(UserError, match=r"give them to Engine\.chat"):
        engine.stream(CHAT, GREEDY)
    for wrong in ("hello", [], [5, 6], [CHAT, []]):
        with pytest.raises(UserError, match="give a list of messages, each with role and content"):
            engine.chat(wrong, GREEDY)
    with pytest.raises(UserError, match="messages of conversation 2 is no conversation"):
        engine.chat([CHAT, [{"content": "no role"}]], GREEDY)


def test_an_engine_and_its_answers_can_be_read(engine: Engine) -> None:
    name = engine.target.name
    assert repr(engine) == f"<Engine of {name!r}: float32 on cpu, suffix draft, k=3>"
    (answer,) = engine.generate([[7, 8, 9] * 5], GREEDY)
    assert re.fullmatch(
        r"Completion\('.*', finish_reason='length', 12 tokens, tau=\d\.\d\d\)", repr(answer)
    )
    (plain,) = engine.generate([[7, 8, 9]], SamplingParams(max_tokens=2, ignore_eos=True, k=0))
    assert repr(plain).endswith("2 tokens)")


class Own:
    family, taps = "own", ()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_bach": 2}, "unknown option 'max_bach'; did you mean 'max_batch'?"),
        ({"max_batch": 0}, "'max_batch' is 0; it must be at least 1"),
        ({"tree": "dynamic"}, "tree dynamic is given without draft or versions"),
        ({"port": 8001}, "option 'port' is of the server alone; leave it out"),
        ({"draft_dtype": "float32"}, "draft_dtype is given without a draft"),
        ({"draft": Suffix(), "draft_revision": "v2"}, "and the suffix drafter given is loaded"),
        ({"draft": Own()}, "draft is a Own, which lacks 'new_pool'; add it, as drafters/interface"),
    ],
)
def test_options_are_those_of_serve(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        Engine("nowhere", **options)


def test_drafts_from_text_and_auto_k_come_by_their_options(target_folder: str) -> None:
    with Engine(target_folder, suffix=True, k="auto", compile="off") as engine:
        assert repr(engine).endswith("suffix draft, k=auto>")
    assert repr(engine).endswith("closed>")
    with pytest.raises(UserError, match="this Engine is closed; make another one"):
        engine.generate("x")


def test_weights_that_are_no_numbers_are_refused(target_folder: str, tmp_path: Path) -> None:
    folder = shutil.copytree(target_folder, tmp_path / "lost")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"NaN or infinite weights, first in row 3 of .*norm"):
        Engine(folder)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"record_taps": 8, "suffix": True}, "record_taps"),
        ({"redact": "no_such_module:mask", "suffix": True}, "no_such_module"),
    ],
)
def test_an_engine_that_cannot_be_built_leaves_no_writer_behind(
    options: dict[str, Any], says: str, target_folder: str, tmp_path: Path
) -> None:
    before = set(threading.enumerate())
    with pytest.raises(UserError, match=says):
        Engine(target_folder, learn=str(tmp_path / "buffer"), compile="off", **options)
    wait_until(lambda: set(threading.enumerate()) <= before, 20)


def test_a_learner_that_is_stopped_at_once_says_where_it_stands(
    target_folder: str, tmp_path: Path
) -> None:
    target = Target.load(target_folder)
    checkpoint.save(Eagle3.create(Eagle3Options(), target, seed=0), tmp_path / "draft", target)
    (tmp_path / "buffer").mkdir()
    stop = threading.Event()
    stop.set()
    learned = draftsmith.distill(
        target.name, draft=tmp_path / "draft", buffer=tmp_path / "buffer",
        versions=tmp_path / "versions", stop=stop,
    )  # fmt: skip
    assert (learned.version, learned.updates, learned.published) == (1, 0, 0)


def test_the_package_names_load_late() -> None:
    code = (
        "import draftsmith, sys; assert 'torch' not in sys.modules; draftsmith.SamplingParams; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert draftsmith.Engine is Engine
    assert all(callable(one) and one.__path__ for one in (draftsmith.train, draftsmith.distill))
    with pytest.raises(UserError, match="unknown option 'step'; did you mean 'steps'"):
        draftsmith.train("eagle3", "t", data="d", out="o", step=3)
    with pytest.raises(UserError, match=r"unknown option 'learn\.rate'; did you mean 'learn\."):
        draftsmith.distill("t", draft="d", buffer="b", versions="v", learn={"rate": 1})
    with pytest.raises(AttributeError, match="Motor"):
        draftsmith.Motor  # noqa: B018


LEFT_OPEN = """
import sys, weakref
from draftsmith import Engine
loops = []
# At the end the newest is called first, so that this one sees what the engine's has done.
weakref.finalize(sys.modules["weakref"], lambda: print("alive", loops[0].healthy))
engine = Engine(sys.argv[1], max_length=32, compile="off")
loops.append(engine._loop)
engine.stream("def main(")
"""


def test_an_engine_left_open_ends_before_the_interpreter(target_folder: str) -> None:
    """Python would take its thread away in the middle of a pass, and C++ aborts at that."""
    words = [sys.executable, "-c", LEFT_OPEN, target_folder]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    assert done.stdout == "alive False\n"


def test_the_readmes_example_runs_and_a_wait_says_what_it_is_for(
    tiny_target: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    (example,) = [block for block in blocks if "from draftsmith import Engine" in block]
    example, count = re.subn(r"Engine\(.*?\) as", f"Engine({tiny_target('llama')!r}) as", example)
    assert count == 1
    exec(compile(example, "README.md", "exec"), {})
    shown = capsys.readouterr()
    assert shown.out.strip()
    said = re.findall(r"^draftsmith: (\w+)", shown.err, re.MULTILINE)
    assert said[-2:] == ["capturing", "ready"]


def test_a_stream_stops_drafting_and_drafts_again(engine: Engine) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    stream = engine.stream([7, 8, 9] * 5, params)
    stream.set_k(0)
    for _ in stream:
        pass
    assert len(stream.request.output) == 60 and stream.request.drafting == "off"
    (alone,) = engine.generate([[7, 8, 9] * 5], params)
    assert stream.request.output == alone.tokens
    assert sum(stream.request.speculation.offered) < sum(alone.speculation.offered)
