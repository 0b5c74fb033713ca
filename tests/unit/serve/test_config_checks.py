"""Settings that no server can work with are one sentence before anything is loaded."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import yaml

from draftsmith.commands.arguments import collect, parse, parser_for
from draftsmith.config import build
from draftsmith.drafters.target.device import device_of
from draftsmith.errors import UserError
from draftsmith.serve.config import EngineConfig, ServeConfig
from draftsmith.serve.config_checks import check, check_engine

NAN = float("nan")
RECIPES = Path(__file__).parents[3] / "recipes" / "serve"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_batch": 0}, "'max_batch' is 0"),
        ({"max_round_tokens": 0}, "'max_round_tokens' is 0"),
        ({"max_queue": 0}, "'max_queue' is 0"),
        ({"block_size": 0}, "'block_size' is 0"),
        ({"k": 65}, "option 'k' is 65; it must be at least 0 and at most 64"),
        ({"k": -1}, "'k' is -1"),
        ({"memory_gib": NAN}, "'memory_gib' is nan"),
        ({"least_confidence": 1.0}, "'least_confidence' is 1.0"),
        (
            {"least_confidence": 0.1, "tree": "auto"},
            "tree auto is given with least_confidence 0.1, which ends chains",
        ),
    ],
)
def test_an_engine_is_not_made_of(options, words):
    check_engine(EngineConfig())
    with pytest.raises(UserError, match=words):
        check_engine(EngineConfig(**options))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"threads": 0}, "'threads' is 0"),
        ({"request_timeout_s": NAN}, "'request_timeout_s' is nan"),
        ({"poll_s": 0.0}, "'poll_s' is 0"),
        ({"drain_s": -1.0}, "'drain_s' is -1"),
        ({"log_stats_s": NAN}, "'log_stats_s' is nan"),
        ({"learn_share": 0.0}, "'learn_share' is 0"),
        ({"record_taps": -1}, "'record_taps' is -1"),
        ({"record_taps": 64}, "record_taps 64 is given without learn"),
        (
            {"record_taps": 64, "learn": "b", "learn_distributions": False},
            "record_taps 64 is given with no-learn-distributions",
        ),
        (
            {"record_taps": 64, "learn": "b", "redact": "m:f"},
            "record_taps 64 is given with redact m:f",
        ),
        ({"port": 65536}, "'port' is 65536"),
        ({"api_key": ("right", " ")}, "api_key is empty"),
        ({"draft_dtype": "bfloat16"}, "draft_dtype is given without a draft"),
        (
            {"draft": "d", "suffix_max_cached_requests": 3},
            "suffix_max_cached_requests 3 is given without suffix",
        ),
        ({"tree": "auto"}, "tree auto is given without draft or versions"),
        (
            {"draft": "d", "suffix": True, "tree": "auto"},
            "tree auto is given with suffix, which copies chains",
        ),
        ({"draft": "d", "k": "3", "tree": "auto"}, "k is 3 together with tree 'auto'"),
        ({"suffix": True, "seed": 0, "learn": "b"}, "seed 0 is given with learn b"),
        ({"seed": 3, "versions": "v"}, "seed 3 is given with versions v"),
    ],
)
def test_a_server_is_not_started_with(options, words):
    check(ServeConfig(target="t", draft="d"))
    check(ServeConfig(target="t", draft="d", suffix=True))
    with pytest.raises(UserError, match=words):
        check(build(ServeConfig, {"target": "t"} | options))


def resolve(*words: str) -> ServeConfig:
    parser = parser_for("serve", ServeConfig)
    return build(ServeConfig, collect(ServeConfig, parse(parser, words)))


def test_a_server_is_the_same_by_flags_and_by_a_file(tmp_path):
    words = (
        "--target t --draft d --lora a=b c=d --k auto --max-length 99 --no-prefix-cache --learn b "
        "--record-taps 64 "
        "--api-key x y --port 0 --suffix --suffix-max-cached-requests 3"
    )
    config, path = resolve(*words.split()), tmp_path / "serve.yaml"
    assert (config.api_key, config.max_length, config.prefix_cache) == (("x", "y"), 99, False)
    assert config.engine_config().record_taps == 64
    path.write_text(yaml.safe_dump(asdict(config)))
    assert resolve(str(path)) == config


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.yaml")), ids=lambda recipe: recipe.stem)
def test_a_shipped_recipe_is_accepted(recipe):
    config = resolve(str(recipe), "--target", "t", "--draft", "d")
    check(config)
    assert config != ServeConfig(target="t", draft="d")


@pytest.mark.parametrize(
    ("device", "words"),
    [("banana", "which torch does not know"), ("cuda:1", "sees no CUDA device")],
)
def test_a_device_that_is_not_there(device, words, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert device_of() == device_of("auto") == device_of("cpu") == torch.device("cpu")
    with pytest.raises(UserError, match=words):
        device_of(device)


def test_a_launchers_rank_without_a_device_of_its_own_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert device_of() == torch.device("cuda:1")
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(UserError, match=r"cuda:3.*2 CUDA devices"):
        device_of()
