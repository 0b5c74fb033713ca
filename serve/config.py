"""What the engine and the server can be told. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from draftsmith.config import option


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    k: int = option(4, "draft tokens a round; a request may ask for fewer or more")
    max_batch: int = option(8, "requests that run at the same time")
    max_round_tokens: int = option(512, "tokens of one target pass; longer prompts are fed in pieces")
    max_queue: int = option(256, "requests that may wait; one more is answered with 503")
    block_size: int = option(16, "positions of a block of keys and values")
    num_blocks: int | None = option(None, "blocks of the paged pool; default: what `memory_gib` or the batch needs")
    memory_gib: float = option(2.0, "most memory for keys and values of the target when `num_blocks` is not given")
    max_length: int | None = option(None, "most tokens of prompt and answer together; default: what the target allows")
    seed: int = option(0, "seeds the requests that bring none")


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    target: str = option(help="the target: a local folder or Hub id")
    draft: str | None = option(None, "a draft checkpoint")
    ngram: bool = option(False, "draft by looking up the longest matching n-gram in the request's own text")
    ngram_min: int = option(2, "shortest n-gram looked up")
    ngram_max: int = option(4, "longest n-gram looked up")
    versions: str | None = option(None, "a folder of draft versions to follow; new ones are swapped in between rounds")
    poll_s: float = option(1.0, "seconds between two looks into the versions folder")
    learn: str | None = option(None, "a buffer folder or URL that records rounds for learning")
    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on")
    api_key: str | None = option(None, "if given, requests must carry it as a bearer token")
    name: str | None = option(None, "model name in the API; default: the target's")
    k: int = option(4, "draft tokens a round; a request may ask for its own number")
    max_batch: int = option(8, "requests that run at the same time")
    max_queue: int = option(256, "requests that may wait; one more is answered with 503")
    max_round_tokens: int = option(512, "tokens of one target pass; longer prompts are fed in pieces")
    max_length: int | None = option(None, "most tokens of prompt and answer together; default: what the target allows")
    block_size: int = option(16, "positions of a block of keys and values")
    num_blocks: int | None = option(None, "blocks of the paged pool; default: what memory_gib or the batch needs")
    memory_gib: float = option(2.0, "most memory for keys and values of the target when num_blocks is not given")
    dtype: str = option(
        "auto", "weights' type; auto: the checkpoint's own, float32 on a CPU", choices=("auto", "float32", "bfloat16", "float16")
    )
    device: str | None = option(None, "torch device; default: the first CUDA device, else the CPU")
    threads: int | None = option(None, "CPU threads of torch; default: all cores but one")
    seed: int = option(0, "seeds the requests that bring none")
    drain_s: float = option(30.0, "seconds that running requests get to finish after SIGTERM")

    def engine(self) -> EngineConfig:
        return EngineConfig(
            k=self.k,
            max_batch=self.max_batch,
            max_round_tokens=self.max_round_tokens,
            max_queue=self.max_queue,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            memory_gib=self.memory_gib,
            max_length=self.max_length,
            seed=self.seed,
        )
