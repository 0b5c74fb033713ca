"""`draftsmith generate` end to end on a tiny target: contents, distributions, resumption after
kills."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import datasets
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftsmith.commands import generate
from draftsmith.commands.generate import EngineAnswers, GenerateConfig
from draftsmith.distill.generate.answers import AnswerFolder, Processes
from draftsmith.distill.generate.writers import Texts, seed_of
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.lock import folder_lock
from draftsmith.serve.config import EngineConfig
from tests import forked
from tests.conftest import small_files
from tests.forked import cli, one_thread


@pytest.fixture(scope="module")
def path(target_folder: str) -> str:
    return target_folder


def config(target: str, out: Path, **changes: object) -> GenerateConfig:
    values: dict = {"prompts": "stdlib:prose", "count": 22, "prompt_tokens": 12, "max_tokens": 16}
    values |= {"batch": 4, "shard": 8, "seed": 5}
    return GenerateConfig(target=target, out=str(out), **{**values, **changes})


WORDS = shlex.split(
    "--prompts stdlib:prose --count 22 --prompt-tokens 12 --max-tokens 16 --batch 4 --shard 8 "
    "--seed 5 --store-taps bf16"
)


def cut_after(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt behind so many answers."""
    write = EngineAnswers.write

    def some(self: EngineAnswers, prompts: list, seeds: list) -> Texts:
        yield from itertools.islice(write(self, prompts, seeds), count)
        raise KeyboardInterrupt

    monkeypatch.setattr(EngineAnswers, "write", some)


def rows(folder: Path) -> list[dict]:
    parts = sorted(folder.glob("part-*.parquet"))
    return [row for part in parts for row in pq.read_table(part).to_pylist()]


def test_answers_distributions_and_provenance(path: str, tmp_path: Path) -> None:
    assert generate.run(config(path, tmp_path / "d", top_logprobs=8)) == 0
    found = rows(tmp_path / "d")
    assert [row["index"] for row in found] == list(range(22))
    files = str(tmp_path / "d" / "part-*.parquet")
    opened = datasets.load_dataset("parquet", data_files=files, cache_dir=str(tmp_path / "cache"))
    assert opened["train"].to_list() == found
    target = Target.load(path)
    for row in found[:5]:
        prompt = len(row["loss_mask"]) - sum(row["loss_mask"])
        assert row["loss_mask"] == [0] * prompt + [1] * (len(row["input_ids"]) - prompt)
        assert 0 < sum(row["loss_mask"]) <= 16
        logits = target.model(torch.tensor([row["input_ids"]])).logits[0, prompt - 1 : -1].double()
        expected = logits.log_softmax(-1).topk(8)
        torch.testing.assert_close(
            torch.tensor(row["top_logprobs"]).double(), expected.values, atol=1e-4, rtol=0
        )
        mass = torch.tensor(row["top_logprobs"]).exp().sum(-1) + torch.tensor(row["tail"])
        torch.testing.assert_close(mass, torch.ones_like(mass), atol=1e-5, rtol=0)
    provenance = json.loads((tmp_path / "d" / "provenance.json").read_text())
    assert provenance["complete"] and provenance["answers"] == 22
    assert provenance["temperature"] == 1.0
    assert provenance["tokens"] == sum(sum(row["loss_mask"]) for row in found)
    assert provenance["target_revision"] == target.revision


@pytest.mark.usefixtures("capsys")  # What is printed goes to no file.
def test_a_full_disk_is_one_sentence_and_costs_what_was_not_written(
    path: str, tmp_path: Path
) -> None:
    """Files of more bytes fail: the record, a batch of answers, their shard, and its states."""
    given = config(path, tmp_path / "full", count=8, top_logprobs=30, store_taps="bf16")
    batches = [f".batch-00000-00000000{first}.parquet" for first in (0, 4)]
    failures = (
        (200, []),
        (6_000, ["provenance.json"]),
        (22_000, [*batches, "provenance.json"]),
        (36_000, ["part-00000.parquet", "provenance.json"]),
    )
    says = r"written to '.*/full' \(.*File too large"
    for most_bytes, written in failures:
        with pytest.raises(UserError, match=says), small_files(most_bytes):
            generate.run(given)
        assert sorted(one.name for one in (tmp_path / "full").iterdir()) == written
    generate.run(given)
    generate.run(replace(given, out=str(tmp_path / "whole")))
    for one in (tmp_path / "whole").iterdir():
        assert one.read_bytes() == (tmp_path / "full" / one.name).read_bytes()


def test_a_second_run_in_the_folder_is_refused(path: str, tmp_path: Path) -> None:
    given = config(path, tmp_path / "data", count=4)
    says = f"data' is in use by another generate .process {os.getpid()} "
    with folder_lock(given.out, "generate"), pytest.raises(UserError, match=says):
        generate.run(given)
    assert generate.run(given) == 0
    assert not (tmp_path / "data" / "generate.lock").exists()


@pytest.mark.long
def test_processes_of_a_launcher_write_what_one_writes(path: str, tmp_path: Path) -> None:
    """Three shards by two processes, one of which was killed before; states are stored, too."""
    words = cli("generate", "--target", path, *WORDS)
    whole = forked.run([*words, "--out", tmp_path / "whole"], env=one_thread())
    assert whole.returncode == 0
    together = [*words, "--out", tmp_path / "together"]
    # The first process alone: what one that was killed, and its launcher, leave.
    shutil.copytree(tmp_path / "whole", tmp_path / "together")
    for left in ("part-00001.parquet", "part-00002.parquet"):
        (tmp_path / "together" / left).unlink()
        (tmp_path / "together" / f"taps-{left[5:10]}.safetensors").unlink()
    before = (tmp_path / "together" / "part-00000.parquet").stat().st_mtime_ns
    processes = forked.Ranks(together, 2)
    said, _ = processes.communicate(timeout=240)
    assert processes.returncode == 0 and said.count("22 answers") == 1, said
    names = sorted(one.name for one in (tmp_path / "whole").iterdir())
    assert sorted(one.name for one in (tmp_path / "together").iterdir()) == names
    assert (tmp_path / "together" / "part-00000.parquet").stat().st_mtime_ns == before
    for name in names:
        found = [(tmp_path / folder / name).read_bytes() for folder in ("whole", "together")]
        assert found[0] == found[1], name


def test_the_end_of_another_process_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> None:
        raise RuntimeError("Connection closed by peer. Look at the logs.")

    monkeypatch.setattr(dist, "barrier", gone)
    with pytest.raises(UserError, match=r"process 1 of 2 ends .*Connection closed by peer\)"):
        Processes(1, 2).wait()


@pytest.mark.parametrize(
    ("changes", "says"), [({"url": "http://one"}, "--url is"), ({"device": "cuda:1"}, "device is")]
)
def test_what_several_processes_cannot_do_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changes: dict, says: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=f"{says}.*WORLD_SIZE is 2"):
        generate.check(config("target", tmp_path / "d", **changes))


@pytest.mark.parametrize(
    "point", ["before the rename", "between the deletions", "in a shard's file"]
)
def test_generation_goes_on_where_it_was_cut_off(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """While a shard is joined, or by a file that is half there afterwards."""
    generate.run(config(path, tmp_path / "whole"))
    real = Path.unlink
    deleted = 0

    def unlink(self: Path, missing_ok: bool = False) -> None:
        nonlocal deleted
        if self.name.startswith(".batch-") and self.suffix == ".parquet":
            if deleted == 1:
                raise KeyboardInterrupt
            deleted += 1
        real(self, missing_ok=missing_ok)

    def write_table(*args: object, **options: object) -> None:
        if options.get("compression") == "zstd":
            raise KeyboardInterrupt
        pq_write(*args, **options)

    pq_write, part = pq.write_table, tmp_path / "cut" / "part-00001.parquet"
    if point == "in a shard's file":
        shutil.copytree(tmp_path / "whole", tmp_path / "cut")
        part.write_bytes(part.read_bytes()[:-50])
    else:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            if point == "before the rename":
                patch.setattr(pq, "write_table", write_table)
            else:
                patch.setattr(Path, "unlink", unlink)
            generate.run(config(path, tmp_path / "cut"))
    files = [one for one in (tmp_path / "cut").glob("*.parquet") if one != part]
    kept = {index for one in files for index in pq.read_table(one)["index"].to_pylist()}
    assert 8 <= len(kept) < 22
    answered: list[int] = []
    write = EngineAnswers.write

    def counted(self: EngineAnswers, prompts: list, seeds: list) -> Texts:
        answered.append(len(prompts))
        return write(self, prompts, seeds)

    monkeypatch.setattr(EngineAnswers, "write", counted)
    for _ in range(2):
        generate.run(config(path, tmp_path / "cut"))
        assert sum(answered) == 22 - len(kept), "what was on disk is neither repeated nor lost"
    assert rows(tmp_path / "cut") == rows(tmp_path / "whole")
    assert not list((tmp_path / "cut").glob(".batch-*"))


def test_answers_are_spread_over_temperatures_and_resume_to_the_same(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict = {"temperature": (0.0, 0.7, 1.0), "count": 9, "max_tokens": 6, "top_logprobs": 2}
    generate.run(config(path, tmp_path / "whole", **changes))
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        cut_after(5, patched)
        generate.run(config(path, tmp_path / "cut", **changes))
    # An interrupt, unlike a kill, costs no finished answer.
    kept = [pq.read_metadata(one).num_rows for one in (tmp_path / "cut").glob("*.parquet")]
    assert sum(kept) == 5
    generate.run(config(path, tmp_path / "cut", **changes))
    found = rows(tmp_path / "whole")
    assert rows(tmp_path / "cut") == found
    assert (
        sorted(round(row["temperature"], 3) for row in found) == [0.0] * 3 + [0.7] * 3 + [1.0] * 3
    )
    target = Target.load(path)
    for row in found:
        prompt = len(row["loss_mask"]) - sum(row["loss_mask"])
        greedy = target.answer([row["input_ids"][:prompt]], max_new_tokens=6)[0]
        assert row["input_ids"][prompt:] == greedy or row["temperature"] > 0
    assert json.loads((tmp_path / "cut" / "provenance.json").read_text())["temperature"] == [
        0.0, 0.7, 1.0,
    ]  # fmt: skip


def test_an_answer_follows_from_its_prompt_and_seed_whatever_shares_its_batch(
    path: str, tmp_path: Path
) -> None:
    """Long and short prompts, three at a time: each answer is the target's own to that prompt alone,
    with its seed."""
    text = "The draft proposes and the target verifies every token of it"
    prompts = [text[: 4 + 6 * n] * (9 if n == 4 else 1) for n in range(8)]
    (tmp_path / "p.txt").write_text("\n".join(prompts))
    changes: dict = {"prompts": str(tmp_path / "p.txt"), "count": None, "chat": "never", "top_k": 9}
    generate.run(config(path, tmp_path / "d", batch=3, temperature=0.8, **changes))
    found = rows(tmp_path / "d")
    target = Target.load(path)
    lengths = [len(row["loss_mask"]) - sum(row["loss_mask"]) for row in found]
    assert lengths == [len(target.tokenizer().encode(prompt)) for prompt in prompts]
    for row, length in zip(found, lengths, strict=True):
        asked = {"temperature": 0.8, "top_k": 9, "seeds": [seed_of(5, row["index"])]}
        (alone,) = target.answer([row["input_ids"][:length]], max_new_tokens=16, **asked)
        assert row["input_ids"][length:] == alone
    with pytest.raises(UserError, match="give more --memory-gib"):
        generate.run(config(path, tmp_path / "little", memory_gib=2e-5, **changes))


def test_started_folder_with_other_options_and_foreign_folder_are_refused(
    path: str, tmp_path: Path
) -> None:
    generate.run(config(path, tmp_path / "d", count=4))
    with pytest.raises(UserError, match=r"temperature 1\.0"):
        generate.run(config(path, tmp_path / "d", count=4, temperature=0.5))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("precious")
    with pytest.raises(UserError, match="other"):
        generate.run(config(path, tmp_path / "other"))


def test_answers_longer_than_the_target_reads_are_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="context of 256"):
        generate.run(config(path, tmp_path / "d", max_tokens=4096))


def test_answers_of_a_server_are_the_targets(
    path: str, live_server: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy: the server's answers are the target's own, end-of-text tokens included, and a started
    folder is resumed."""
    server = live_server(Target.load(path), None, EngineConfig(block_size=8, num_blocks=256))
    generate.run(config(path, tmp_path / "own", temperature=0.0, max_tokens=40))
    asked = config(path, tmp_path / "served", temperature=0.0, max_tokens=40, url=server.url)
    with monkeypatch.context() as cut:
        added = []

        def add_twice(self: AnswerFolder, shard: int, found: list[dict]) -> None:
            if len(added) == 2:
                raise KeyboardInterrupt
            added.append(shard)
            honest(self, shard, found)

        honest = AnswerFolder.add
        cut.setattr(AnswerFolder, "add", add_twice)
        with pytest.raises(KeyboardInterrupt):
            generate.run(asked)
    generate.run(asked)
    own, served = rows(tmp_path / "own"), rows(tmp_path / "served")
    assert [row["input_ids"] for row in served] == [row["input_ids"] for row in own]
    assert [row["loss_mask"] for row in served] == [row["loss_mask"] for row in own]
    assert any(row["input_ids"][-1] == 0 for row in own)  # some answer ended by itself
    provenance = json.loads((tmp_path / "served" / "provenance.json").read_text())
    assert provenance["answered_by"] == "server of tiny" and provenance["target_revision"] is None


def test_chats_keep_their_answers_with_distributions_and_are_trained_on(
    path: str, tmp_path: Path
) -> None:
    turns = ["Who verifies?", "The target.", "Who learns?", "The draft learns."]
    roles = ("user", "assistant") * 2
    chats = [
        [{"role": role, "content": f"{text} {n}"} for role, text in zip(roles, turns)]
        for n in range(6)
    ]
    lines = "\n".join(json.dumps({"messages": chat}) for chat in chats)
    (tmp_path / "chats.jsonl").write_text(lines)
    options = {"count": None, "keep_answers": True, "top_logprobs": 4}
    generate.run(config(path, tmp_path / "d", prompts=str(tmp_path / "chats.jsonl"), **options))
    tokenizer = Target.load(path).tokenizer()
    said = []
    for row in rows(tmp_path / "d"):
        answer = zip(row["input_ids"], row["loss_mask"], strict=True)
        said.append(tokenizer.decode([token for token, bit in answer if bit]))
        assert len(row["top_ids"]) == sum(row["loss_mask"])
    # A row each: by this template the end of an answer is no part of the next prompt.
    answers = [turn["content"] for chat in chats for turn in chat[1::2]]
    assert said == [answer + tokenizer.eos_token for answer in answers]
    # Nobody sampled it, so no temperature is claimed.
    assert json.loads((tmp_path / "d" / "provenance.json").read_text())["temperature"] is None


@pytest.fixture
def talkative(target_folder: str, tmp_path: Path) -> str:
    """A target whose tokens are words, a tenth of which end its turn."""
    path = Path(shutil.copytree(target_folder, tmp_path / "talkative"))
    size = json.loads((path / "config.json").read_text())["vocab_size"]
    names = ["<end>", "<user>", "<assistant>", *(f"w{number}" for number in range(3, size))]
    model = models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="w3")
    words = Tokenizer(model)
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(names[:3])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")
    wrapped.chat_template = (
        "{% for message in messages %}<{{ message.role }}> {{ message.content }} <end> {% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    wrapped.save_pretrained(path)
    ends = list(range(0, size, 10))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return str(path)


SELF = shlex.split(
    "--self-prompts 20 --self-prompts-tokens 40 --max-tokens 4 --batch 4 --shard 8 --seed 5"
)


KILLED = """
import os, sys
from draftsmith import cli
from draftsmith.distill.generate.answers import AnswerFolder
add, batches = AnswerFolder.add, 0
def add_then_die(self, shard, rows):
    global batches
    if batches == 3:
        os.kill(os.getpid(), 9)
    add(self, shard, rows)
    batches += 1
AnswerFolder.add = add_then_die
sys.exit(cli.main(sys.argv[1:]))
"""


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(one.relative_to(folder)): one.read_bytes()
        for one in sorted(folder.rglob("*"))
        if one.suffix in (".parquet", ".jsonl", ".json")
    }


@pytest.mark.long
def test_prompts_that_the_target_writes_are_the_same_after_a_kill_and_by_several_processes(
    talkative: str, tmp_path: Path
) -> None:
    words, environment = cli("generate", "--target", talkative, *SELF), one_thread()
    whole, cut, together = (tmp_path / name for name in ("whole", "cut", "together"))
    said = forked.run([*words, "--out", whole], env=environment, capture_output=True, text=True)
    assert said.returncode == 0 and "20 of " in said.stdout and "20 answers" in said.stdout
    lines = (whole / "self-prompts" / "prompts.jsonl").read_text().splitlines()
    asked = [json.loads(line)["prompt"] for line in lines]
    assert len(set(asked)) == len(asked) == 20 and all(len(text.split()) >= 4 for text in asked)
    tokenizer = Target.load(talkative).tokenizer()
    for row, text in zip(rows(whole), asked, strict=True):
        prompt = [
            id for id, mine in zip(row["input_ids"], row["loss_mask"], strict=True) if not mine
        ]
        assert tokenizer.decode(prompt) == f"<user> {text} <end> <assistant>"
    record = json.loads((whole / "provenance.json").read_text())
    assert record["prompts"] == "self-prompts" and record["self_prompts"]["count"] == 20
    assert record["complete"] and record["self_prompts"]["dropped"]

    killed = forked.run(
        [sys.executable, "-c", KILLED, *words[3:], "--out", cut], capture_output=True, text=True
    )
    assert killed.returncode == -9, killed.stderr
    assert list((cut / "self-prompts").glob("*.parquet")) and not list(cut.glob("*.parquet"))
    assert forked.run([*words, "--out", cut], env=environment).returncode == 0
    ranks = forked.Ranks([*words, "--out", together], 2)
    told, _ = ranks.communicate(timeout=240)
    assert ranks.returncode == 0 and told.count("20 answers") == 1, told

    found = contents(whole)
    assert contents(cut) == found
    # Two processes may write a shard more than one needs.
    assert {name: contents(together)[name] for name in found} == found


def test_a_folder_of_other_prompts_is_refused_before_any_is_written(
    talkative: str, tmp_path: Path
) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "provenance.json").write_text("{}")
    with pytest.raises(UserError, match="was not started with --self-prompts"):
        generate.run(config(talkative, tmp_path / "d", prompts="", count=None, self_prompts=4))
    assert [one.name for one in (tmp_path / "d").iterdir()] == ["provenance.json"]


def test_a_target_without_a_chat_template_writes_no_prompts(path: str, tmp_path: Path) -> None:
    base = Path(shutil.copytree(path, tmp_path / "base"))
    for one in base.glob("*template*"):
        one.unlink()
    settings = json.loads((base / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=r"can write no prompts of its own .*; give --prompts"):
        generate.run(config(str(base), tmp_path / "d", prompts="", count=None, self_prompts=4))
