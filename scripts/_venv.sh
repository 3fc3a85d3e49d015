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
    local python extras stamp
    python=$(find_python) || return 1
    if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
        [ -d .venv ] || "$python" -m venv --system-site-packages .venv
        extras=$(echo "$*" | tr ' ' '\n' | grep -v '^cpu$' | paste -sd, -) || true
    else
        [ -d .venv ] || "$python" -m venv .venv
        extras=$(echo "$*" | tr ' ' ',')
    fi
    # shellcheck disable=SC1091
    source .venv/bin/activate
    stamp=.venv/installed-$(cat pyproject.toml - <<<"$extras" | sha256sum | cut -c1-16)
    if [ ! -e "$stamp" ]; then
        echo "installing into .venv (a minute or two) ..." >&2
        if ! python -c 'import torch' 2>/dev/null; then
            # shellcheck disable=SC2086
            pip install --quiet --disable-pip-version-check ${TORCH_INSTALL:-torch==2.13.0} 2>&1 | grep -v '^WARNING' >&2 || true
        fi
        pip install --quiet --disable-pip-version-check -e ".${extras:+[$extras]}" 2> >(grep -v '^WARNING' >&2)
        touch "$stamp"
    fi
}
