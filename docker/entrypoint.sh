#!/usr/bin/env bash
# What a container runs:
#   FLAGS...                       the runner, in one process
#   --nproc_per_node=N FLAGS...    in N processes, as torchrun takes it; the variable NPROC says the same
#   COMMAND ...                    anything that does not begin with a dash, e.g. bash
set -euo pipefail

processes=${NPROC:-1}
flags=()
if [[ $# -gt 0 && $1 != -* ]]; then
    exec "$@"
fi
while [[ $# -gt 0 ]]; do
    case $1 in
        --nproc_per_node=* | --nproc-per-node=*) processes=${1#*=} ;;
        --nproc_per_node | --nproc-per-node)
            processes=${2:?--nproc_per_node needs a number of processes}
            shift
            ;;
        *) flags+=("$1") ;;
    esac
    shift
done
if [[ ! $processes =~ ^([1-9][0-9]*|gpu|cpu|auto)$ ]]; then
    echo "error: --nproc_per_node (or NPROC) $processes is not a count of 1 or more, gpu, cpu or auto" >&2
    exit 2
fi
exec torchrun --standalone --nproc_per_node="$processes" -m runner "${flags[@]}"
