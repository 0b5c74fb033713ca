"""No call loads a model, tokenizer or configuration but through `drafters/target/load.py`, which
says whether code may run."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
THE_PLACE = ROOT / "drafters" / "target" / "load.py"
CODE = ("kernels", "drafters", "train", "serve", "distill", "fleet", "src/draftsmith")
# A file without a folder's code, of which no class is asked for it.
OF_FILES = ROOT / "drafters" / "layouts" / "gguf.py"
# Gives transformers a class of ours for a name; chooses none by a folder.
REGISTERS = ROOT / "drafters" / "layouts" / "folder.py"
LOADERS = ("from_pretrained", "from_config")
# They read numbers and options from JSON; what they read can hold no code.
WITHOUT_CODE = (
    "GenerationConfig.from_pretrained",
    "PeftConfig.from_pretrained",
    "PeftModel.from_pretrained",
)


def sources(*folders: str) -> list[Path]:
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return sorted(
        {path for path in paths if not path.is_symlink() and "__pycache__" not in path.parts}
    )


def asks(source: str) -> list[str]:
    """Calls that leave it to transformers, and so to a question on the terminal, whether a folder's
    code is run."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    loading = [
        call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr in LOADERS
    ]
    names = [ast.unparse(call.func) for call in loading if trust_of(call) is None]
    return [name for name in names if name not in WITHOUT_CODE]


def trust_of(call: ast.Call) -> ast.expr | None:
    given = (word.value for word in call.keywords if word.arg == "trust_remote_code")
    return next(
        (value for value in given if not (isinstance(value, ast.Constant) and value.value is None)),
        None,
    )


def autos(source: str) -> list[str]:
    """What choose a class by a folder's files: transformers' Auto classes and pipelines, and
    torch's hub."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "transformers":
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names.append(ast.unparse(node))
    known = ("Auto", "pipeline", "transformers.Auto", "transformers.pipeline", "torch.hub.load")
    return [name for name in names if name.startswith(known)]


def test_every_call_says_whether_code_of_a_folder_may_run() -> None:
    paths = sources(*CODE, "scripts")
    assert THE_PLACE in paths and len(paths) > 200
    assert not {str(path): found for path in paths if (found := asks(path.read_text()))}


def test_classes_are_chosen_by_a_folder_in_one_place() -> None:
    assert set(autos(THE_PLACE.read_text())) >= {
        "AutoConfig",
        "AutoModelForCausalLM",
        "AutoTokenizer",
    }
    used = {name for name in autos(REGISTERS.read_text()) if "." in name}
    assert used == {"AutoConfig.register", "AutoModelForCausalLM.register"}
    paths = [path for path in sources(*CODE) if path not in (THE_PLACE, OF_FILES, REGISTERS)]
    assert not {str(path): found for path in paths if (found := autos(path.read_text()))}


def test_what_scripts_load_never_runs_code_of_a_folder() -> None:
    for path in sources("scripts"):
        calls = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
        ]
        given = [trust for call in calls if (trust := trust_of(call)) is not None]
        assert all(isinstance(trust, ast.Constant) and trust.value is False for trust in given), (
            path.name
        )
