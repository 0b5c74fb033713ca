"""The deployment files fit together: commands parse, settings are settings, and every name that one
part uses another has."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftsmith import config as configuration
from draftsmith.commands.arguments import collect, parse, parser_for
from draftsmith.commands.table import COMMANDS, load
from draftsmith.fleet.vllm.worker import SECTION, Settings
from draftsmith.train.export.serving import VLLM_METHODS

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
# Of the Compose Specification, those that are used.
SERVICE = {
    "image", "build", "command", "environment", "ports", "ipc", "volumes", "deploy", "healthcheck",
    "restart", "stop_grace_period", "depends_on",
}  # fmt: skip
VLLM_BRINGS = {
    "torch", "transformers", "safetensors", "huggingface-hub", "numpy", "pyyaml",
}  # fmt: skip
GUIDE = (ROOT / "docs/guides/vllm.md").read_text(encoding="utf-8")


def manifests() -> dict[tuple[str, str], dict[str, Any]]:
    folder = DEPLOY / "kubernetes"
    listed = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    assert sorted(listed) == sorted(
        path.name for path in folder.glob("*.yaml") if path.stem != "kustomization"
    )
    found = [one for name in listed for one in yaml.safe_load_all((folder / name).read_text())]
    return {(one["kind"], one["metadata"]["name"]): one for one in found}


def check_command(words: list[str]) -> None:
    name, *argv = words
    config = load(COMMANDS[name].config)
    configuration.build(config, collect(config, parse(parser_for(name, config), argv)))


def check_engine(words: list[str]) -> dict[str, Any]:
    """Settings of the plugin in an engine's arguments."""
    given = dict(itertools.pairwise(words))
    speculative = json.loads(given["--speculative-config"])
    assert speculative["method"] in {one["method"] for one in VLLM_METHODS.values()}
    assert set(speculative) == {"method", "model", "num_speculative_tokens", "draft_sample_method"}
    settings = json.loads(given["--additional-config"])[SECTION]
    assert configuration.convert(settings, Settings, SECTION) and {"buffer", "versions"} <= set(
        settings
    )
    return settings


def filled(text: str, values: dict[str, str]) -> str:
    """`${NAME:-default}`, `${NAME:?error}` and `$(NAME)` with their values."""
    text = re.sub(r"\$\{(\w+):[-?]([^}]*)\}", lambda found: values.get(found[1]) or found[2], text)
    return re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], text)


def compose() -> dict[str, Any]:
    example = (DEPLOY / "settings.env.example").read_text()
    values = dict(re.findall(r"^(\w+)=(.*)$", example, re.MULTILINE))
    text = (DEPLOY / "compose.yaml").read_text()
    asked = set(re.findall(r"\$\{(\w+):\?", text))
    assert asked <= set(values) and all(values[name] for name in asked)
    assert "$(" not in text and not re.search(r"\$\{\w+\}", text)
    return yaml.safe_load(filled(text, values))


def test_compose_services_have_what_they_name() -> None:
    found = compose()
    assert set(found) == {"name", "services", "volumes"}
    assert set(found["services"]) == {"engine", "learner", "publisher"}
    images = {one["image"] for one in found["services"].values() if "build" in one}
    for service in found["services"].values():
        assert set(service) <= SERVICE and service["image"] in images
        assert set(service.get("depends_on", [])) <= set(found["services"])
        for volume in service["volumes"]:
            source, place = volume.split(":")[:2]
            assert place.startswith("/") and (source in found["volumes"] or "/" in source)
        if "build" in service:
            assert (DEPLOY / service["build"]["context"]).resolve() == ROOT
            assert (ROOT / service["build"]["dockerfile"]).is_file()
    # What one writes another reads, in the same place.
    assert all("store:/store" in one["volumes"] for one in found["services"].values())


def test_compose_commands_run() -> None:
    services = compose()["services"]
    settings = check_engine(services["engine"]["command"])
    assert services["engine"]["environment"]["VLLM_PLUGINS"] == "draftsmith"
    learner, publisher = (services[name]["command"] for name in ("learner", "publisher"))
    check_command(learner)
    check_command(publisher)
    assert learner[learner.index("--buffer") + 1] == settings["buffer"]
    assert publisher[publisher.index("--to") + 1] == settings["versions"]
    assert publisher[publisher.index("--versions") + 1] == learner[learner.index("--versions") + 1]


def pods(found: dict[tuple[str, str], dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for (kind, name), one in found.items():
        if kind in ("StatefulSet", "Deployment"):
            labels = one["spec"]["template"]["metadata"]["labels"]
            assert one["spec"]["selector"]["matchLabels"] == labels
            yield name, one["spec"]["template"]["spec"]


def test_kubernetes_parts_have_what_they_name() -> None:
    found = manifests()
    labels = [
        one["spec"]["template"]["metadata"]["labels"]
        for (kind, _), one in found.items()
        if kind in ("StatefulSet", "Deployment")
    ]
    (service,) = [one for (kind, _), one in found.items() if kind == "Service"]
    assert service["spec"]["selector"] in labels
    images = yaml.safe_load((DEPLOY / "kubernetes/kustomization.yaml").read_text())["images"]
    for name, pod in pods(found):
        volumes = {one["name"]: one for one in pod["volumes"]}
        for one in volumes.values():
            claim = one.get("persistentVolumeClaim")
            assert claim is None or ("PersistentVolumeClaim", claim["claimName"]) in found
        for container in pod["containers"]:
            assert {one["name"] for one in container["volumeMounts"]} <= set(volumes)
            assert container["image"] in {one["name"] for one in images}
            ports = {one["name"] for one in container.get("ports", ())}
            probes = [value for key, value in container.items() if key.endswith("Probe")]
            assert {one["httpGet"]["port"] for one in probes} <= ports
            (settings,) = [one for one in container["envFrom"] if "configMapRef" in one]
            assert ("ConfigMap", settings["configMapRef"]["name"]) in found
        assert name in {"draftsmith-engine", "draftsmith-learner"}


def test_kubernetes_commands_run() -> None:
    found = manifests()
    values = found["ConfigMap", "draftsmith"]["data"]
    assert all(isinstance(one, str) for one in values.values())
    arguments = {
        container["name"]: [filled(word, values) for word in container["args"]]
        for _, pod in pods(found)
        for container in pod["containers"]
    }
    settings = check_engine(arguments["vllm"])
    check_command(arguments["distill"])
    check_command(arguments["publish"])
    assert settings["buffer"] == values["BUFFER"] and settings["versions"] == values["VERSIONS"]
    used = set(re.findall(r"\$\((\w+)\)", json.dumps(list(found.values()))))
    assert used == set(values)


def test_settings_in_the_guide_are_settings() -> None:
    (command,) = re.findall(r"^\s+VLLM_PLUGINS=.*?```", GUIDE, re.MULTILINE | re.DOTALL)
    words = re.findall(r"'[^']*'|\S+", command)
    check_engine([word.strip("'") for word in words])


def test_images_install_what_they_copy() -> None:
    for path in DEPLOY.glob("*.Dockerfile"):
        lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
        words = [line.split()[0] for line in lines]
        assert [word for word in words if word not in ("RUN", "ARG")] == [
            "FROM",
            "COPY",
            "ENTRYPOINT",
        ]
        copied, run = words.index("COPY"), len(words) - 2
        assert copied < run and words[run] == "RUN" and "/draftsmith" in lines[run]
        assert isinstance(json.loads(lines[-1].split(None, 1)[1]), list)


def test_the_engines_image_has_what_vllm_does_not_bring() -> None:
    (declared,) = re.findall(
        r"^dependencies = \[(.*?)\]$", (ROOT / "pyproject.toml").read_text(), re.M | re.S
    )
    needed = set(re.findall(r'"([a-z-]+)', declared)) - VLLM_BRINGS
    installed = (DEPLOY / "engine.Dockerfile").read_text().rpartition("uv pip install")[2].split()
    assert needed and needed <= set(installed)


@pytest.mark.parametrize("name", ["learner", "serve"])
def test_our_own_images_have_a_compiler(name: str) -> None:
    """Without one neither Triton nor the kernels for the CPU can be compiled."""
    assert "install -y --no-install-recommends g++" in (DEPLOY / f"{name}.Dockerfile").read_text()


def test_the_servers_image_serves_what_is_given_behind_its_name() -> None:
    *_, entry = (DEPLOY / "serve.Dockerfile").read_text().splitlines()
    program, *words = json.loads(entry.removeprefix("ENTRYPOINT "))
    assert program == "draftsmith" and "0.0.0.0" in words
    check_command([*words, "--target", "/t", "--suffix", "--port", "0"])
    extras = re.findall(r"/draftsmith\[(.*)\]", (DEPLOY / "serve.Dockerfile").read_text())
    assert extras == [COMMANDS["serve"].extra]
