"""Where `scripts/environment.sh` takes torch from: pip, uv, nvidia-smi and uname are stand-ins that
log how they are called."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("bash", "sed", "grep", "cat", "sleep", "mkdir", "cp", "chmod")
LISTED = "torch (2.15.0)\nAvailable versions: 2.15.0, 2.14.1, {}2.13.0, 2.12.1"
NO_MATCH = "12.13.0+cpu, 2.13.0+cpu.other, 2.13.0+cu130, "
PYTHON = """
case "$*" in
    "-m pip index versions torch") echo "$LISTED"; sleep 0.1; echo "  INSTALLED: 2.12.1" ;;
    *"--target .venv/uv uv") [ -e "$BIN/uv-to-install" ] && mkdir -p .venv/uv/bin && cp "$BIN/uv-to-install" .venv/uv/bin/uv ;;
esac
"""


class Machine:
    """A folder as PATH and a working directory; every call of a stand-in is a line of `log`."""

    def __init__(self, folder: Path):
        self.bin, self.log, self.work = folder / "bin", folder / "log", folder / "work"
        self.bin.mkdir()
        self.work.mkdir()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool) or tool)
        for name in ("constraints.txt", "pyproject.toml"):
            shutil.copy(ROOT / name, self.work)
        self.log.touch()
        self.environment = {
            "PATH": str(self.bin),
            "BIN": str(self.bin),
            "LISTED": LISTED.format(NO_MATCH),
        }
        self.stand_in("python", PYTHON)
        self.stand_in("nvidia-smi", "exit 1")
        self.stand_in("uname", "echo Linux")
        self.stand_in("timeout", 'limit_s=$1; shift; "$@"')

    def stand_in(self, name: str, body: str) -> Path:
        path = self.bin / name
        path.write_text(f'#!{shutil.which("bash")}\necho "{name} $*" >>"{self.log}"\n{body}\n')
        path.chmod(0o755)
        return path

    def run(self, script: str) -> subprocess.CompletedProcess[str]:
        command = [
            str(self.bin / "bash"),
            "-c",
            f"set -uo pipefail; source {ROOT}/scripts/environment.sh; {script}",
        ]
        return subprocess.run(
            command, cwd=self.work, env=self.environment, text=True, capture_output=True, timeout=60
        )

    def choose(self) -> tuple[str, str, list[str]]:
        """The source, what stderr says, and the calls that installing from there makes."""
        done = self.run("torch_source python")
        assert done.returncode == 0
        self.log.write_text("")
        source = done.stdout.strip()
        self.run(f"install_torch python {source}")
        return source, done.stderr, self.log.read_text().splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


INDEX = "https://cpu.example/simple"
BY_PIP = ["python -m pip install --no-deps --progress-bar off torch==2.13.0"]
BY_INDEX = [BY_PIP[0].replace("torch==", f"--index-url {INDEX} torch==")]
BY_UV = ["uv pip install --python python --torch-backend cpu --no-deps torch==2.13.0"]
DRY_RUN = "--reinstall --dry-run torch==2.13.0"


def is_warning(text: str) -> bool:
    return text.count("\n") == 1 and "2.7 GB" in text and "TORCH_CPU_INDEX" in text


@pytest.mark.parametrize(
    ("stand_ins", "named", "listed", "last_asked", "calls"),
    [
        ({"nvidia-smi": "exit 0"}, INDEX, NO_MATCH, "nvidia-smi", BY_PIP),
        ({"uname": "echo Darwin"}, "", NO_MATCH, "uname", BY_PIP),
        ({"uv": "exit 0"}, INDEX, NO_MATCH, "uname", BY_INDEX),
        ({"uv": "exit 0"}, "", "2.13.0+cpu, ", "python", BY_PIP),
        ({"uv": "exit 0"}, "", NO_MATCH, "uv", BY_UV),
        (
            {"uv-to-install": "exit 0"},
            "",
            NO_MATCH,
            "uv-to-install",
            [BY_UV[0].replace("uv", "uv-to-install")],
        ),
    ],
    ids=["cuda", "no_linux", "named_index", "build_where_pip_looks", "uv", "uv_to_install"],
)
def test_torch_comes_without_gigabytes_and_nothing_needless_is_asked(
    machine: Machine, stand_ins, named: str, listed: str, last_asked: str, calls: list[str]
) -> None:
    machine.environment |= {"TORCH_CPU_INDEX": named, "LISTED": LISTED.format(listed)}
    for name, body in stand_ins.items():
        machine.stand_in(name, body)
    machine.run("torch_source python")
    log = machine.log.read_text().splitlines()
    assert log[-1].split()[0] == last_asked
    tried = [line for line in log if line.startswith("uv")]
    assert len(tried) == last_asked.startswith("uv") and all(DRY_RUN in line for line in tried)
    assert machine.choose()[1:] == ("", calls)


@pytest.mark.parametrize("stand_ins", [{"uv": "exit 2"}, {}], ids=["uv_reaches_none", "no_uv"])
def test_where_only_gigabytes_are_left_one_line_says_so(machine: Machine, stand_ins) -> None:
    for name, body in stand_ins.items():
        machine.stand_in(name, body)
    source, said, calls = machine.choose()
    assert source == "pip" and is_warning(said) and calls == BY_PIP
