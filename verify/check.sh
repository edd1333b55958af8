#!/usr/bin/env bash
# Checks ring.pml: what must hold holds, and what is broken on purpose is found to be.
set -euo pipefail
model="$(cd "$(dirname "$0")" && pwd)/ring.pml"
command -v spin >/dev/null || {
    echo "spin is not installed: apt-get install spin" >&2
    exit 1
}
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cd "$folder"

# check NAME EXPECTED_ERRORS MODEL_OPTIONS COMPILER_OPTIONS RUN_OPTIONS
check() {
    # shellcheck disable=SC2086  # the options are several words
    spin $3 -a "$model" >spin.out 2>&1 || { cat spin.out; exit 1; }
    # shellcheck disable=SC2086
    cc -O2 -w -DCOLLAPSE -DMEMLIM=4000 $4 -o pan pan.c
    # shellcheck disable=SC2086
    ./pan $5 >pan.out 2>&1 || true
    local errors states
    errors="$(sed -n 's/.*errors: \([0-9]*\).*/\1/p' pan.out)"
    states="$(sed -n 's/ *\([0-9.e+]*\) states, stored.*/\1/p' pan.out)"
    if [ "$errors" != "$2" ] || grep -q "search depth too small\|out of memory\|max. depth" pan.out; then
        echo "verify: $1: $errors errors instead of $2" >&2
        cat pan.out >&2
        exit 1
    fi
    echo "verify: $1: as it should be ($states states)"
}

safety="-DSAFETY -DNOCLAIM"
check "safe" 0 "" "$safety" "-m4000000"
check "served" 0 "-DSLOTS=1" "-DNFAIR=3" "-a -f -m4000000"
check "deaths, safe" 0 "-DDEATHS -DLEARNERS=1" "$safety" "-m4000000"
check "deaths" 0 "-DDEATHS -DLEARNERS=1" "-DNFAIR=4" "-a -f -m4000000"
check "broken sleep" 1 "-DBROKEN_SLEEP" "$safety" "-m4000000"
check "broken doze" 1 "-DBROKEN_DOZE" "$safety" "-m4000000"
check "broken order" 1 "-DBROKEN_ORDER" "$safety" "-m4000000"
