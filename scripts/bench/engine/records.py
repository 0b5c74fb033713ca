"""Cost of recording; `scripts/bench_records --help`. Turns with and without a buffer alternate,
so that a loaded machine slows them alike; each pair of turns answers the same prompts with the same
seeds."""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from time import (
    clock_gettime,
    perf_counter,
    process_time,
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
from draftsmith.drafters.checkpoint import load
from draftsmith.drafters.target.target import Target
from draftsmith.kernels.acceptance import bootstrap_ratio
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.engine import Engine
from draftsmith.serve.engine.recorder import Recorder
from draftsmith.serve.sampling.params import SamplingParams


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
        "--turns", type=int, default=12, help="pairs of turns, after one that does not count"
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


class Meter:
    """Seconds that the engine's thread works for recording: the part of the cost that no other core
    can take over."""

    def __init__(self) -> None:
        self.seconds, self.counts = 0.0, False

    def around(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            begun_s = thread_time()
            result = work(*arguments)
            self.seconds += (thread_time() - begun_s) * self.counts
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
    engine = build_engine(
        target, load(options.draft, target), EngineConfig(k=options.k, max_batch=options.batch)
    )
    writer = BufferWriter(folder, share=options.share)
    meter = Meter()
    engine.committer.distributions = meter.around(engine.committer.distributions)
    recorders = {
        "on": Recorder(writer, target=target.name, target_revision=target.revision),
        "off": Recorder(None, target=target.name, target_revision=target.revision),
    }
    on = recorders["on"]
    on.round, on.finish = meter.around(on.round), meter.around(on.finish)
    walls: dict[str, list[float]] = {name: [] for name in recorders}
    process_s = writer_s = 0.0
    for turn in range(options.turns + 1):
        asked = prompts[turn * options.batch : (turn + 1) * options.batch]
        for name in ("on", "off") if turn % 2 else ("off", "on"):
            engine.committer.recorder, meter.counts = recorders[name], turn > 0 and name == "on"
            begun = perf_counter(), process_time(), writer_cpu(writer)
            answer(engine, asked, options, seed=turn)
            drain(writer)
            if turn > 0:
                walls[name].append(perf_counter() - begun[0])
            if meter.counts:
                process_s += process_time() - begun[1]
                writer_s += writer_cpu(writer) - begun[2]
    writer.close()
    records = BufferReader(folder).read(max_records=10**9).records
    positions = sum(len(record.drafted) for record in records)
    recorded = positions * options.turns / (options.turns + 1)
    rest_s = process_s - writer_s - meter.seconds
    return {
        "throughput": {
            "of_that_without": round(sum(walls["off"]) / sum(walls["on"]), 4),
            "interval": [round(bound, 4) for bound in bootstrap_ratio(walls["off"], walls["on"])],
        },
        "percent_of_all_other_work": {
            "engine_thread": round(100 * meter.seconds / rest_s, 2),
            "writer_thread": round(100 * writer_s / rest_s, 2),
        },
        "us_a_position": {
            "engine_thread": round(1e6 * meter.seconds / recorded, 1),
            "writer_thread": round(1e6 * writer_s / recorded, 1),
        },
        "bytes_a_position": round(
            sum(shard.bytes for shard in Folder(folder).shards()) / positions, 1
        ),
        "positions": positions,
        "records": len(records),
        "dropped": writer.dropped,
        "ms_a_turn": {
            name: round(1e3 * statistics.median(values), 1) for name, values in walls.items()
        },
    }


def answer(
    engine: Engine, prompts: list[list[int]], options: argparse.Namespace, *, seed: int
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


def writer_cpu(writer: BufferWriter) -> float:
    """CPU seconds of its thread, from the system's clock, so that a busy machine does not change
    them."""
    assert writer._thread.ident is not None
    return clock_gettime(pthread_getcpuclockid(writer._thread.ident))


def drain(writer: BufferWriter) -> None:
    """Empties the queue, so that a turn pays for its own records."""
    while writer._queue:
        writer._wake.set()
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
