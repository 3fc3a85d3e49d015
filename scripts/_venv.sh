# Sourced by demo.sh and test.sh: makes and activates .venv at the top of the repository.
#
#   venv [EXTRA ...]    installs the project with those extras of pyproject.toml, once for each version of that file
#
# Where the machine's own python3 has a torch that sees a GPU, that torch and its triton are used and left alone.
# TORCH_INSTALL overrides what is installed elsewhere, e.g. a CPU index: TORCH_INSTALL="torch==2.13.0 --index-url URL".

find_python() {
    local candidate
    for candidate in python3 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "Python 3.11 or 3.12 is needed; found $(python3 --version 2>&1 || echo none)" >&2
    return 1
}

venv() {
    local python extras stamp keep=/dev/null
    python=$(find_python) || return 1
    extras=$(IFS=,; echo "$*")
    if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
        [ -d .venv ] || "$python" -m venv --system-site-packages .venv
        extras=$(echo "$extras" | sed -E 's/(^|,)cpu(,|$)/\1/')
        # pip then says so, instead of putting another torch over the machine's, if the project cannot use this one
        keep=.venv/keep.txt
        "$python" -m pip freeze 2>/dev/null | grep -E '^(torch|triton|pytorch-triton-rocm)==' >"$keep" || true
    else
        [ -d .venv ] || "$python" -m venv .venv
    fi
    # shellcheck disable=SC1091
    source .venv/bin/activate
    stamp=.venv/installed-$(cat pyproject.toml - <<<"$extras" | sha256sum | cut -c1-16)
    if [ ! -e "$stamp" ]; then
        echo "installing into .venv (a minute or two where pip has a CPU torch at hand) ..." >&2
        if ! python -c 'import torch' 2>/dev/null; then
            # shellcheck disable=SC2086
            quiet_pip ${TORCH_INSTALL:-torch==2.13.0} || return 1
        fi
        quiet_pip -c "$keep" -e ".${extras:+[$extras]}" || return 1
        touch "$stamp"
    fi
}

quiet_pip() {
    pip install --quiet --disable-pip-version-check "$@" 2> >(grep -v '^WARNING: Location' >&2)
}
