#!/usr/bin/env bash
# Responses and training of the demo drafter on one GPU without a network, at most eight minutes.
#
#   PROMPTS="a.jsonl b.jsonl" bash scripts/gpu_train.sh
#
# The demo target is taken from HF_DRELAY_DEMO_TARGET; if that folder holds `model.safetensors.part-*`, the parts are
# put together first. Results go to $OUT (default: runs/gpu), weights and responses in files of at most 15 MB.
set -euo pipefail
shopt -s nullglob
cd "$(dirname "$0")/.."
: "${PROMPTS:?name the prompt files: PROMPTS=\"a.jsonl b.jsonl\" bash scripts/gpu_train.sh}"
python="${PYTHON:-python3}"
out="${OUT:-runs/gpu}"
work="$(mktemp -d)"
mkdir -p "$out"

target="${HF_DRELAY_DEMO_TARGET:-}"
parts=(${target:+"$target"/model.safetensors.part-*})
if [ ${#parts[@]} -gt 0 ]; then
    cat "${parts[@]}" > "$target/model.safetensors"
fi

sources=()
for file in $PROMPTS; do
    sources+=(--prompts "$file")
done
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
timeout "${RESPONSE_SECONDS:-150}" "$python" -m hf_drelay.cli prepare-data "${sources[@]}" --output "$work/responses" \
    --batch-size "${BATCH_SIZE:-512}" --shard-size "${SHARD_SIZE:-1024}" || echo "responses: stopped at the time limit"

responses=("$work"/responses/*.jsonl.gz)
if [ ${#responses[@]} -eq 0 ]; then
    echo "no shard of responses was finished; allow more RESPONSE_SECONDS or a smaller SHARD_SIZE" >&2
    exit 1
fi
cp "${responses[@]}" "$out"/
# shellcheck disable=SC2086
timeout "${TRAIN_SECONDS:-300}" "$python" -m hf_drelay.cli train --config "${CONFIG:-examples/recipes/gpu-10min.yaml}" \
    --output_dir "$work/run" --responses "${responses[@]}" ${MORE_RESPONSES:-} || echo "training: stopped at the time limit"

# The finished drafter, or else the newest whole checkpoint: the machine may not be there tomorrow.
trained="$work/run/drafter"
if [ ! -d "$trained" ]; then
    states=("$work"/run/checkpoint-*/trainer_state.json)
    [ ${#states[@]} -eq 0 ] || trained="$(dirname "$(ls -t "${states[@]}" | head -n 1)")"
fi
if [ ! -f "$trained/model.safetensors" ]; then
    echo "nothing was trained to a checkpoint" >&2
    exit 1
fi
cp "$trained"/*.json "$out"/
split --bytes=15000000 --numeric-suffixes "$trained/model.safetensors" "$out/model.safetensors.part-"
