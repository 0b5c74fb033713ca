# Sourced by scripts/test and scripts/quickstart: `make_environment` gives a `.venv` that fits pyproject.toml and constraints.txt.
# shellcheck shell=bash

# with_clock LABEL EXPECTED_S LOG COMMAND...: runs COMMAND into LOG and shows how long it has taken and is expected to take.
with_clock() {
    local label=$1 expected_s=$2 log=$3 every_s=15
    shift 3
    [ -t 1 ] && every_s=1
    local begun_s=$SECONDS
    echo "$label: about $(minutes "$expected_s")"
    "$@" >>"$log" 2>&1 </dev/null &
    local job=$! shown_s=0 taken_s
    while kill -0 "$job" 2>/dev/null; do
        sleep 0.1
        taken_s=$((SECONDS - begun_s))
        if [ $((taken_s - shown_s)) -ge "$every_s" ]; then
            shown_s=$taken_s
            clock_line "$label" "$taken_s" "$expected_s"
        fi
    done
    local status=0
    wait "$job" || status=$?
    [ -t 1 ] && [ "$shown_s" -gt 0 ] && echo
    if [ "$status" -ne 0 ]; then
        echo "$label: failed with status $status; the end of $log:" >&2
        grep -v '^WARNING' "$log" | tail -n 20 >&2
        return "$status"
    fi
    echo "$label: done in $((SECONDS - begun_s)) s"
}

clock_line() {
    local left_s=$(($3 - $2)) text
    text="$1: $2 s, about $left_s s left"
    [ "$left_s" -gt 0 ] || text="$1: $2 s, longer than expected, still going"
    if [ -t 1 ]; then printf '\r\033[K%s' "$text"; else echo "$text"; fi
}

minutes() {
    if [ "$1" -lt 90 ]; then echo "$1 s"; else echo "$((($1 + 30) / 60)) min"; fi
}

# The first Python that pyproject.toml allows, with a working venv module.
find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11 python3.10 python; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' 2>/dev/null; then
            command -v "$candidate"
            return 0
        fi
    done
    echo "no Python from 3.10 to 3.13 with the venv module was found; install one (Debian: apt install python3-venv) or set PYTHON" >&2
    return 1
}

# The version that constraints.txt pins.
torch_version() { sed -n 's/^torch==//p' constraints.txt; }

# uv_command PYTHON: the path of uv, which knows where PyTorch keeps its CPU builds; installed beside the environment where missing.
uv_command() {
    command -v uv && return
    [ -x .venv/uv/bin/uv ] || "$1" -m pip install --quiet --target .venv/uv uv >/dev/null 2>&1 || return 1
    echo .venv/uv/bin/uv
}

# pip_takes_cpu_build PYTHON: whether a CPU build of that version lies where pip looks. Only names are read: a dry run would fetch
# the whole build from an index that holds no metadata.
pip_takes_cpu_build() {
    local versions
    # Not piped into `grep -q`, which ends early: under pipefail pip's broken pipe would count as a no.
    versions=$("$1" -m pip index versions torch 2>/dev/null)
    grep -Eq "[ ,]$(torch_version)\+cpu(,|$)" <<<"$versions"
}

# uv_reaches_cpu_build PYTHON: an answer within 20 s, from a network that may swallow every packet. An installed torch is no answer.
uv_reaches_cpu_build() {
    local uv
    uv=$(uv_command "$1") || return 1
    UV_HTTP_TIMEOUT=5 UV_HTTP_RETRIES=0 timeout 20 "$uv" pip install --python "$1" --torch-backend cpu --no-deps --reinstall --dry-run \
        "torch==$(torch_version)" >/dev/null 2>&1
}

# torch_source PYTHON: where torch comes from. `pip`: what pip takes by itself, which is right with a CUDA device and off Linux;
# `index`: TORCH_CPU_INDEX; `uv`: PyTorch's own CPU builds. With no CPU build in reach, one line on stderr tells what will be fetched.
torch_source() {
    if nvidia-smi >/dev/null 2>&1 || [ "$(uname -s)" != Linux ]; then
        echo pip
    elif [ -n "${TORCH_CPU_INDEX:-}" ]; then
        echo index
    elif pip_takes_cpu_build "$1"; then
        echo pip
    elif uv_reaches_cpu_build "$1"; then
        echo uv
    else
        echo "environment: no CUDA device, and no CPU build of torch $(torch_version) in reach: its CUDA build is installed, which runs" \
            "here too (2.7 GB to fetch, 4.6 GB on disk); to avoid that, stop and set TORCH_CPU_INDEX to an index of CPU builds" >&2
        echo pip
    fi
}

# install_torch PYTHON SOURCE: torch alone; what it requires comes with the project, from the ordinary index.
install_torch() {
    local torch uv
    torch="torch==$(torch_version)"
    case $2 in
        uv)
            uv=$(uv_command "$1") && "$uv" pip install --python "$1" --torch-backend cpu --no-deps "$torch"
            ;;
        index) "$1" -m pip install --no-deps --progress-bar off --index-url "$TORCH_CPU_INDEX" "$torch" ;;
        *) "$1" -m pip install --no-deps --progress-bar off "$torch" ;;
    esac
}

# has_torch PYTHON: any build of the pinned version.
has_torch() {
    [ "$("$1" -c 'from importlib.metadata import version; print(version("torch").split("+")[0])' 2>/dev/null)" = "$(torch_version)" ]
}

install_project() {
    "$1" -m pip install --progress-bar off -c constraints.txt -e '.[dev]'
}

# make_environment: creates or repairs .venv, activates it. A second call with unchanged requirements costs nothing.
make_environment() {
    local python stamp
    if [ -f src/draftsmith/kernels ]; then
        echo "src/draftsmith/kernels is a text file in place of a symbolic link, so this checkout has no code; clone again with" \
            "'git clone -c core.symlinks=true' where symbolic links are allowed" >&2
        return 1
    fi
    if [ ! -x .venv/bin/python ]; then
        python=$(find_python) || return 1
        echo "environment: making .venv with $("$python" --version)"
        "$python" -m venv .venv || return 1
    fi
    stamp=$(cat pyproject.toml constraints.txt | cksum | tr ' ' '-')
    if [ "$(cat .venv/requirements.stamp 2>/dev/null)" != "$stamp" ]; then
        : >.venv/install.log
        if ! has_torch .venv/bin/python; then
            with_clock "environment: installing torch" 60 .venv/install.log \
                install_torch .venv/bin/python "$(torch_source .venv/bin/python)" || return 1
        fi
        with_clock "environment: installing draftsmith with the versions of constraints.txt and the tools of its checks" 150 .venv/install.log \
            install_project .venv/bin/python || return 1
        echo "$stamp" >.venv/requirements.stamp
    fi
    # shellcheck disable=SC1091
    source .venv/bin/activate
}
