# Sourced by ./demo and ./test: makes environments from the lock files and keeps them current.
#
#   environment DIR NAME...         brings DIR to locks/NAME.txt for each NAME and installs kvferry, sets $python
#   environment_locks DIR NAME...   the same without kvferry itself
#
# Each lock leaves its digest in DIR/.locks/NAME, so an unchanged one costs nothing. `say` is where progress
# goes: standard error, since standard output belongs to the command that follows.

say() { printf '%s\n' "$*" >&2; }

environment_python() {
    for candidate in ${KVFERRY_PYTHON:-} python3.11 python3.12 python3.13 python3.14 python3 python; do
        found=$(command -v "$candidate" 2>/dev/null) || continue
        if "$found" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s\n' "$found"
            return 0
        fi
    done
    return 1
}

environment_need_python() {
    base=$(environment_python) && return 0
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        say "installing python3-venv (no Python >= 3.11 with venv was found)"
        { apt-get update -qq && apt-get install -y -qq python3 python3-venv; } >/dev/null 2>&1
        base=$(environment_python) && return 0
    fi
    say "kvferry needs Python 3.11 or later with the venv module; install it (Debian: python3-venv) or set" \
        "KVFERRY_PYTHON to one."
    exit 2
}

# Runs a command whose output matters only if it fails; shows that time passes.
environment_quietly() {
    label=$1
    shift
    log=$(mktemp)
    started=$(date +%s)
    "$@" >"$log" 2>&1 &
    worker=$!
    while kill -0 "$worker" 2>/dev/null; do
        if [ -t 2 ]; then printf '\r%s ... %d s ' "$label" $(($(date +%s) - started)) >&2; fi
        sleep 0.5
    done
    if wait "$worker"; then
        if [ -t 2 ]; then printf '\r' >&2; fi
        say "$label: done in $(($(date +%s) - started)) s"
        rm -f "$log"
        return 0
    fi
    say ""
    say "$label: failed"
    tail -n 15 "$log" >&2
    rm -f "$log"
    return 1
}

environment_locks() {
    venv=$root/$1
    shift
    python=$venv/bin/python
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        environment_need_python
        rm -rf "$venv"
        environment_quietly "making $venv with $base" "$base" -m venv "$venv" || exit 2
    fi
    mkdir -p "$venv/.locks"
    for lock in "$@"; do
        digest=$(cksum <"$root/locks/$lock.txt")
        [ "$digest" = "$(cat "$venv/.locks/$lock" 2>/dev/null)" ] && continue
        environment_quietly "installing locks/$lock.txt" "$python" -m pip install --no-input \
            --disable-pip-version-check --no-deps -r "$root/locks/$lock.txt" || exit 2
        if [ "$lock" = torch ] && ! "$python" -c 'import torch' >/dev/null 2>&1; then
            say "torch does not import: the index gave a build that needs GPU libraries. Point PIP_EXTRA_INDEX_URL" \
                "at PyTorch's index of CPU builds, remove $venv and start again."
            exit 2
        fi
        printf '%s\n' "$digest" >"$venv/.locks/$lock"
    done
}

environment() {
    environment_locks "$@"
    digest="$(cksum <"$root/pyproject.toml") $root"
    if [ "$digest" != "$(cat "$venv/.locks/project" 2>/dev/null)" ]; then
        environment_quietly "installing kvferry" "$python" -m pip install --no-input --disable-pip-version-check \
            --no-deps --no-build-isolation -e "$root" || exit 2
        printf '%s\n' "$digest" >"$venv/.locks/project"
    fi
}
