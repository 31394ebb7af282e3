#!/usr/bin/env bash
# One prepared run for a machine with a GPU and no network, at most four minutes; see scripts/gpu_check.py, which takes
# the arguments. Nothing is installed. PYTHON names the interpreter; by default the first one that has torch and
# transformers is taken.
set -euo pipefail
cd "$(dirname "$0")/.."

has_libraries() {
    "$1" -c 'import sys, importlib.util as u; sys.exit(not (u.find_spec("torch") and u.find_spec("transformers")))' \
        >/dev/null 2>&1
}

if [ -n "${PYTHON:-}" ]; then
    candidates=("$PYTHON")
else
    candidates=(.venv/bin/python python3 python)
fi
python=""
for candidate in "${candidates[@]}"; do
    if has_libraries "$candidate"; then
        python="$candidate"
        break
    fi
done
if [ -z "$python" ]; then
    echo "${candidates[*]}: no Python with torch and transformers; name one: PYTHON=/path/to/python bash scripts/gpu_check.sh" >&2
    exit 2
fi

# The last line that the script prints says where the record lies.
export PYTHONUNBUFFERED=1
exec "$python" scripts/gpu_check.py "$@"
