"""Ways in which answers are written: the temperature and the thinking of each, spread over the
prompts where there are several."""

from __future__ import annotations

import itertools
import random
from typing import Any, NamedTuple

import pyarrow as pa

from draftsmith.distill.config import GenerateOptions

THINKING: dict[str | None, tuple[bool | None, ...]] = {
    None: (None,),
    "on": (True,),
    "off": (False,),
    "both": (True, False),
}


class Way(NamedTuple):
    temperature: float
    thinking: bool | None  # None: as the chat template does by itself


def temperatures(config: GenerateOptions) -> tuple[float, ...]:
    given = config.temperature
    return given if isinstance(given, tuple) else (given,)


def hottest(config: GenerateOptions) -> float:
    """Highest temperature that something is drawn at."""
    asking = () if config.self_prompts is None else (config.self_prompts_temperature,)
    return max(*temperatures(config), *asking, 0.0)


def way_of(config: GenerateOptions, number: int) -> Way:
    """Way of the answer to a prompt: every way comes once in as many prompts in a row, in an order
    of the seed, so that no pattern of the prompts falls together with it."""
    ways = list(itertools.product(temperatures(config), THINKING[config.thinking]))
    block, at = divmod(number, len(ways))
    order = random.Random(f"{config.seed} ways {block}").sample(range(len(ways)), len(ways))
    return Way(*ways[order[at]])


def columns_of(config: GenerateOptions) -> list[tuple[str, pa.DataType]]:
    """Columns of what differs from row to row."""
    columns = [("temperature", pa.float32())] if len(temperatures(config)) > 1 else []
    return columns + ([("thinking", pa.bool_())] if config.thinking == "both" else [])


def recorded(config: GenerateOptions, way: Way | None) -> dict[str, Any]:
    """Entries of a row in these columns."""
    return {} if way is None else {name: way._asdict()[name] for name, _ in columns_of(config)}
