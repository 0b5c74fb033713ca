"""Cost of recording; `scripts/bench_records --help`. Turns without a buffer, with one, and with one that
holds states take turns, so that a loaded machine slows them alike; each round of them answers the same
prompts with the same seeds."""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from time import (
    clock_gettime,
    perf_counter,
    pthread_getcpuclockid,
    sleep,
    thread_time,
)
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from draftsmith.distill.buffer.buffer import BufferReader, BufferWriter
from draftsmith.distill.buffer.folder import Folder
from draftsmith.distill.buffer.process import SETTLED, TAKEN, Job, ProcessWriter
from draftsmith.drafters.checkpoint import load
from draftsmith.drafters.target.target import Target
from draftsmith.kernels.acceptance import bootstrap_ratio
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.engine import Engine
from draftsmith.serve.engine.recorder import Recorder
from draftsmith.serve.sampling.params import SamplingParams

THREAD = "thread"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument(
        "--data",
        required=True,
        help="a folder that draftsmith generate wrote; its prompts are asked",
    )
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument(
        "--share", type=float, default=1.0, help="of the requests that are recorded"
    )
    parser.add_argument(
        "--record-taps", type=int, default=0, help="turns with states too, as `serve --record-taps`"
    )
    parser.add_argument(
        "--thread", action="store_true", help="turns with a writer in a thread of the engine's too"
    )
    parser.add_argument(
        "--turns", type=int, default=12, help="of each way, after one that does not count"
    )
    parser.add_argument("--out", type=Path, help="writes the JSON here too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    target = Target.load(options.target, dtype="float32")
    prompts = read_prompts(options.data, options.batch * (options.turns + 1))
    with tempfile.TemporaryDirectory() as folder:
        report = {
            "load_average_before": os.getloadavg()[0],
            **measure(target, prompts, options, folder),
        }
    report["taps"] = taps(
        target, load(options.draft, target).taps, [prompt + prompt for prompt in prompts[:8]]
    )
    report["load_average_after"] = os.getloadavg()[0]
    text = json.dumps(report, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")


@dataclass
class Way:
    """Recording or none, and what its turns took. The time of the engine's thread is the part of the
    cost that no other core can take over."""

    recorder: Recorder
    writer: BufferWriter | ProcessWriter | None = None
    walls_s: list[float] = field(default_factory=list)
    # Of the engine's thread and the writer, by turn.
    cpus_s: list[float] = field(default_factory=list)
    threads_s: list[float] = field(default_factory=list)  # of the engine's thread, by turn
    engine_s: float = 0.0
    rounds: int = 0
    writer_s: float = 0.0

    def place(self, engine: Engine) -> None:
        engine.recorder = engine.committer.recorder = engine.outputs.recorder = self.recorder


class Meter:
    """Seconds that the engine's thread works for the recording of a way; None counts none."""

    def __init__(self) -> None:
        self.way: Way | None = None

    def around(self, work: Callable[..., Any], *, is_round: bool = False) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            begun_s = thread_time()
            result = work(*arguments)
            if self.way is not None:
                self.way.engine_s += thread_time() - begun_s
                self.way.rounds += is_round
            return result

        return timed


def read_prompts(data: str, count: int) -> list[list[int]]:
    table = pa.concat_tables(
        [pq.read_table(path) for path in sorted(Path(data).glob("part-*.parquet"))]
    )
    found = [tokens[:48] for tokens in table["input_ids"].to_pylist() if len(tokens) >= 48]
    return [found[index % len(found)] for index in range(count)]


def measure(
    target: Target, prompts: list[list[int]], options: argparse.Namespace, folder: str
) -> dict[str, Any]:
    # Each way is asked the same prompts, and one that holds states could not go on from the blocks of
    # one that does not.
    config = EngineConfig(
        k=options.k, max_batch=options.batch, prefix_cache=options.record_taps == 0
    )
    engine = build_engine(target, load(options.draft, target), config)
    meter = Meter()
    ways = ways_of(engine, options, Path(folder), meter)
    for turn in range(options.turns + 1):
        asked = prompts[turn * options.batch : (turn + 1) * options.batch]
        first = turn % len(ways)
        for name in [*ways, *ways][first : first + len(ways)]:
            take_turn(engine, ways[name], meter, asked, options, turn)
    found = {name: figures(name, ways, Path(folder), options) for name in list(ways)[1:]}
    return {
        **found.pop("on"),
        **found,
        "ms_a_turn": {
            name: round(1e3 * statistics.median(way.walls_s), 1) for name, way in ways.items()
        },
    }


def ways_of(
    engine: Engine, options: argparse.Namespace, folder: Path, meter: Meter
) -> dict[str, Way]:
    new_recorder = partial(
        Recorder, target=engine.target.name, target_revision=engine.target.revision
    )
    positions = {"on": 0} | ({THREAD: 0} if options.thread else {})
    positions |= {"with_taps": options.record_taps} if options.record_taps else {}
    ways = {"off": Way(new_recorder(None))}
    for name, most in positions.items():
        make = BufferWriter if name == THREAD else process_writer
        writer = make(str(folder / name), share=options.share)
        taps = engine.proposer.taps if most else ()
        recorder = new_recorder(writer, taps=taps, tap_positions=most)
        for part in ("round", "end_round", "finish", "keep_taps"):
            work = meter.around(getattr(recorder, part), is_round=part == "end_round")
            setattr(recorder, part, work)
        ways[name] = Way(recorder, writer)
    return ways


def take_turn(
    engine: Engine,
    way: Way,
    meter: Meter,
    asked: Sequence[list[int]],
    options: argparse.Namespace,
    turn: int,
) -> None:
    """Answers to all that is asked; the first turn of each way does not count."""
    way.place(engine)
    meter.way = way if turn > 0 else None
    begun_s, thread_s, writer_s = perf_counter(), thread_time(), writer_cpu(way.writer)
    answer(engine, asked, options, seed=turn)
    wall_s, thread_s = perf_counter() - begun_s, thread_time() - thread_s
    drain(way.writer)
    if turn > 0:
        writer_s = writer_cpu(way.writer) - writer_s
        way.walls_s.append(wall_s)
        way.cpus_s.append(thread_s + writer_s)
        way.threads_s.append(thread_s)
        way.writer_s += writer_s


def figures(
    name: str, ways: dict[str, Way], folder: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Cost of one way beside each of those before it, the first of which records nothing."""
    way, before = ways[name], list(ways)[: list(ways).index(name)]
    assert way.writer is not None
    way.writer.close()
    records = BufferReader(str(folder / name)).read(max_records=10**9).records
    positions = sum(len(record.drafted) for record in records)
    recorded = positions * options.turns / (options.turns + 1)
    rest_s = sum(way.cpus_s) - way.writer_s - way.engine_s
    shares = {other: throughput(ways[other], way) for other in before}
    stored = sum(shard.bytes for shard in Folder(str(folder / name)).shards())
    return {
        "throughput": shares.pop("off"),
        **({"throughput_of_recording": shares["on"]} if shares else {}),
        "percent_of_all_other_work": {
            "engine_thread": round(100 * way.engine_s / rest_s, 2),
            "writer": round(100 * way.writer_s / rest_s, 2),
        },
        "us_a_position": {
            "engine_thread": round(1e6 * way.engine_s / recorded, 1),
            "writer": round(1e6 * way.writer_s / recorded, 1),
        },
        "engine_thread_us_a_round": round(1e6 * way.engine_s / way.rounds, 1),
        "bytes_a_position": round(stored / positions, 1),
        "bytes_a_token": round(
            stored / sum(len(record.context) + len(record.committed) for record in records), 1
        ),
        "positions": positions,
        "records": len(records),
        "dropped": way.writer.dropped,
    }


def throughput(before: Way, way: Way) -> dict[str, Any]:
    """Share of the speed of `before`, by the clock, by CPU time of engine and writer (what is left
    where no core is free, whatever else the machine does), and by that of the engine's thread alone
    (where one is free, without waits). `pairs` are the lowest, the median and the highest."""
    found: dict[str, Any] = {}
    for name, old_s, new_s in (
        ("", before.walls_s, way.walls_s),
        ("_by_cpu", before.cpus_s, way.cpus_s),
        ("_by_engine_cpu", before.threads_s, way.threads_s),
    ):
        found[f"of_that_without{name}"] = round(sum(old_s) / sum(new_s), 4)
        found[f"interval{name}"] = [round(bound, 4) for bound in bootstrap_ratio(old_s, new_s)]
        ratios = sorted(old / new for old, new in zip(old_s, new_s))
        pairs = ratios[0], statistics.median(ratios), ratios[-1]
        found[f"pairs{name}"] = [round(ratio, 4) for ratio in pairs]
    return found


def answer(
    engine: Engine, prompts: Sequence[list[int]], options: argparse.Namespace, *, seed: int
) -> None:
    # Requests with a seed of their own are not recorded.
    engine.inputs._seeds = Random(seed)
    params = SamplingParams(
        temperature=options.temperature, max_tokens=options.tokens, ignore_eos=True
    )
    for prompt in prompts:
        engine.submit(prompt, params)
    while engine.busy:
        engine.step()


def process_writer(folder: str, share: float) -> ProcessWriter:
    writer = ProcessWriter(Job(folder, share=share))
    while not writer.ring.statuses:
        sleep(0.1)
    return writer


def writer_cpu(writer: BufferWriter | ProcessWriter | None) -> float:
    """CPU seconds of its thread or process, from the system's clock, so that a busy machine does
    not change them."""
    if writer is None:
        return 0.0
    if isinstance(writer, ProcessWriter):
        assert writer.child.pid is not None
        return clock_gettime(~writer.child.pid << 3 | 2)  # Linux's number of a process's clock
    assert writer._thread.ident is not None
    return clock_gettime(pthread_getcpuclockid(writer._thread.ident))


def drain(writer: BufferWriter | ProcessWriter | None) -> None:
    """Waits until all is written, so that the work of a turn's records is counted with it."""
    while isinstance(writer, BufferWriter) and writer._queue:
        writer._wake.set()
        sleep(0.001)
    while isinstance(writer, ProcessWriter) and (
        writer.ring.used or writer.ring.counts[SETTLED] < writer.ring.counts[TAKEN]
    ):
        sleep(0.001)


def taps(target: Target, layers: tuple[int, ...], texts: list[list[int]]) -> dict[str, float]:
    """Microseconds and bytes per position: taps and last state written and read again, against one
    pass of the target."""
    ids = torch.tensor(texts)
    mask = torch.ones_like(ids)
    target.states(ids, mask, layers)
    begun_s = perf_counter()
    with torch.no_grad():
        states, hidden = target.states(ids, mask, layers)
    pass_s = perf_counter() - begun_s
    parts = [hidden] if states is None else [states, hidden]
    begun_s = perf_counter()
    data = io.BytesIO()
    values = (
        torch.cat(parts, dim=-1).flatten(0, 1).bfloat16().view(torch.int16).numpy().view(np.uint8)
    )
    column = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(values.shape[1]), len(values), [None, pa.py_buffer(values.tobytes())]
    )
    pq.write_table(pa.table({"states": column}), data, compression="zstd", use_dictionary=False)
    data.seek(0)
    pq.read_table(data)
    store_s = perf_counter() - begun_s
    count = ids.numel()
    return {
        "recompute_us": round(1e6 * pass_s / count, 1),
        "write_and_read_us": round(1e6 * store_s / count, 1),
        "stored_bytes": round(len(data.getvalue()) / count, 1),
    }


if __name__ == "__main__":
    main()
