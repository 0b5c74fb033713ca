"""Sections of `serve`: in a file, as overrides, and as flags without the section's name."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from draftsmith.commands.arguments import collect, parse, parser_for
from draftsmith.config import build, flag_options, to_dict
from draftsmith.serve.config import ServeConfig
from draftsmith.serve.config_checks import check

RECIPES = Path(__file__).parents[3] / "recipes" / "serve"
WORDS = [
    *("--target", "t", "--draft", "d", "--lora", "a=b", "c=d", "--k", "auto", "--max-length", "99"),
    *("--no-prefix-cache", "--learn", "b", "--api-key", "x", "y", "--port", "0"),
    *("--fallback", "suffix", "--suffix-max-cached-requests", "3", "--synthetic-acceptance", "0.5"),
]


def resolve(*words: str) -> ServeConfig:
    parser = parser_for("serve", ServeConfig)
    return build(ServeConfig, collect(ServeConfig, parse(parser, words)))


def test_recorded_positions_reach_the_engine() -> None:
    config = resolve("--target", "t", "--draft", "d", "--learn", "b", "--record-taps", "64")
    assert config.engine_config().record_taps == 64


def test_a_server_is_the_same_by_flags_sections_and_a_file_of_either(tmp_path: Path) -> None:
    config, path = resolve(*WORDS), tmp_path / "serve.yaml"
    assert config.http.api_key == ("x", "y") and config.engine.max_length == 99
    values = yaml.safe_load(yaml.safe_dump(to_dict(config)).replace("!!python/tuple", ""))
    path.write_text(yaml.safe_dump(values))
    assert resolve("--config", str(path)) == resolve(str(path)) == config
    flat = {
        name: one
        for key, value in values.items()
        for name, one in (value.items() if isinstance(value, dict) else [(key, value)])
    }
    path.write_text(yaml.safe_dump(flat))
    assert len(flat) == len(flag_options(ServeConfig)), "two options of one name"
    assert resolve("--config", str(path)) == config
    overrides = [
        f"{key}.{name}={yaml.safe_dump(one, default_flow_style=True).splitlines()[0]}"
        for key, value in values.items()
        if isinstance(value, dict)
        for name, one in value.items()
    ]
    assert resolve(*overrides, "--target", "t", "--draft", "d", "--lora", "a=b", "c=d") == config


def test_a_choice_may_be_off(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("target: t\nengine:\n  compile: off\n")
    assert resolve(str(path)).engine.compile == "off"
    assert resolve("--target", "t", "compile=off").engine.compile == "off"


def test_no_section_has_the_name_of_an_option() -> None:
    sections = {option.path[0] for option in flag_options(ServeConfig) if len(option.path) > 1}
    assert not sections & {option.field.name for option in flag_options(ServeConfig)}


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.yaml")), ids=lambda recipe: recipe.stem)
def test_a_shipped_recipe_is_accepted(recipe: Path) -> None:
    config = resolve("--config", str(recipe), "--target", "t", "--draft", "d")
    check(config)
    assert config != ServeConfig(target="t", draft="d")
