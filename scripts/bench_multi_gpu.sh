#!/usr/bin/env bash
# Sweep rank counts and parallel settings of bench_e2e.py on this node, one file a setting.
#
#   bash scripts/bench_multi_gpu.sh [--dry] [--out DIR] [--ranks "1 2 4 8"] [--settings REGEX] [flags of bench_e2e.py]
#   bash scripts/bench_multi_gpu.sh --variants ours xfuser
#   bash scripts/bench_multi_gpu.sh --ranks "1 2" --model tiny --height 256 --width 256 --num_frames 17    # any CPU
#
# Started again it goes on where it stopped: a finished DIR/e2e_N_SETTING.json is never run again nor overwritten; one
# that failed or was interrupted is. DIR (default: results/multi_gpu) belongs to one set of flags. --dry lists what
# would run. --ranks defaults to 1, 2, 4 and 8, as many as there are GPUs; without a GPU the ranks are gloo's.
# Exit code: 0 all settings are finished, 1 some failed (DIR/*.log says why), 2 bad usage.
set -uo pipefail
cd "$(dirname "$0")/.."

out=results/multi_gpu ranks="" only=. dry="" flags=()
while [ $# -gt 0 ]; do
    case $1 in
        --out | --ranks | --settings)
            [ $# -ge 2 ] || { echo "error: $1 needs a value" >&2; exit 2; }
            case $1 in --out) out=$2 ;; --ranks) ranks=$2 ;; --settings) only=$2 ;; esac
            shift ;;
        --out=* | --ranks=* | --settings=*)
            echo "error: ${1%%=*} and its value are two words" >&2
            exit 2 ;;
        --dry) dry=1 ;;
        -h | --help) sed -n '2,12s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) flags+=("$1") ;;
    esac
    shift
done

python=${PYTHON:-$(command -v python || command -v python3)}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

gpus() {
    if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
        nvidia-smi -L | grep -c '^GPU'
    elif command -v rocm-smi >/dev/null && rocm-smi --showid 2>/dev/null | grep -q '^GPU'; then
        rocm-smi --showid | grep -o '^GPU\[[0-9]*\]' | sort -u | wc -l
    else
        "$python" -c 'import torch; print(torch.cuda.device_count())' 2>/dev/null ||
            { echo "error: $python has no torch; give another, PYTHON=PATH" >&2; return 1; }
    fi
}

if [ -z "$ranks" ]; then
    found=$(gpus) || exit 2
    for n in 1 2 4 8; do [ "$n" -le $((found > 0 ? found : 1)) ] && ranks+=" $n"; done
    echo "$found GPUs: ranks$ranks" >&2
fi

for n in $ranks; do
    [[ $n =~ ^[1-9][0-9]*$ ]] || { echo "error: --ranks $n is not a count of 1 or more" >&2; exit 2; }
done
[[ "" =~ $only ]] 2>/dev/null
[ $? -ne 2 ] || { echo "error: --settings $only is not a regular expression" >&2; exit 2; }

# One setting a line: its name, then its flags.
settings() {
    local n=$1
    if [ "$n" = 1 ]; then
        echo "whole"
        echo "chunks --enable_tiling"
        return
    fi
    echo "u${n} --ulysses_degree $n"
    echo "u${n}_pvae --ulysses_degree $n --use_parallel_vae"
    echo "u${n}_pvae_chunks --ulysses_degree $n --use_parallel_vae --enable_tiling"
    echo "u${n}_pvae_tiled --ulysses_degree $n --use_parallel_vae --vae_decode tiled"
    echo "r${n}_pvae --ring_degree $n --use_parallel_vae"
    [ "$n" -lt 4 ] || echo "u$((n / 2))r2_pvae --ulysses_degree $((n / 2)) --ring_degree 2 --use_parallel_vae"
    echo "d${n} --data_parallel_degree $n"
}

known() { for n in $ranks; do settings "$n"; done | cut -d " " -f 1; }
known | grep -Eq -- "$only" || {
    echo "error: --settings $only matches none of: $(known | tr '\n' ' ')" >&2
    exit 2
}

finished() { # the JSON of a run that timed something
    "$python" - "$1" <<'PYTHON' 2>/dev/null
import json, sys
rows = json.load(open(sys.argv[1]))["rows"]
sys.exit(not (rows and any("median_seconds" in row for row in rows) and not any("cut_short" in row for row in rows)))
PYTHON
}

run() { # ranks, name, flags
    local n=$1 row=$out/e2e_$1_$2 launch=("$python")
    [ "$n" = 1 ] || launch+=(-m torch.distributed.run --standalone "--nproc_per_node=$n")
    shift 2
    local command=("${launch[@]}" scripts/bench_e2e.py "$@" "${flags[@]+"${flags[@]}"}")
    if [ -e "$row.json" ]; then
        echo "done     $row.json"
    elif [ -n "$dry" ]; then
        echo "to do    $row.json: ${command[*]#"$python" }"
    elif "${command[@]}" --out "$row.part" >"$row.log" 2>&1 && finished "$row.part"; then
        mv -n "$row.part" "$row.json"
        grep -A99 '; medians, seconds$' "$row.log" | sed '/^{/,$d'
        echo "finished $row.json"
    else
        echo "failed   $row.json: $(grep -v '^{' "$row.log" | tail -n 1) ($row.log)"
        return 1
    fi
}

if [ -z "$dry" ]; then
    mkdir -p "$out" || exit 2
    exec 9>"$out/.lock"
    if command -v flock >/dev/null && ! flock -n 9; then
        echo "error: another sweep is writing to --out $out" >&2
        exit 2
    fi
fi
if [ -e "$out/flags.txt" ] && [ "$(cat "$out/flags.txt")" != "${flags[*]-}" ]; then
    echo "error: --out $out holds rows of other flags ($(cat "$out/flags.txt")); give another folder" >&2
    exit 2
fi
[ -n "$dry" ] || echo "${flags[*]-}" >"$out/flags.txt"

trap 'echo "interrupted; start it again to go on" >&2; exit 130' INT TERM
failed=0
for n in $ranks; do
    while read -r name line; do
        [[ $name =~ $only ]] || continue
        # shellcheck disable=SC2086
        run "$n" "$name" $line </dev/null || failed=1
    done < <(settings "$n")
done
exit $failed
