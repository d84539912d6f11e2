#!/usr/bin/env bash
# PP2xTP4 on two NVLink quads. Usage: serve_ds41.sh [--foreground] [--dry-run] [--strict]
set -euo pipefail

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
ROOT="$(dirname "$HERE")"
SESSION=ds41
LOG_DIR="${DS41_LOG_DIR:-$ROOT/logs}"
FOREGROUND=0 DRY_RUN=0 STRICT=0

usage() {
  cat <<USAGE
usage: $(basename "$0") [--foreground] [--dry-run] [--strict]
  it's "detached" unless you say otherwise
USAGE
}
die() { echo "serve_ds41: $*" >&2; exit 1; }
warn() {
  echo "warning: $*" >&2
  if (( STRICT )); then exit 1; fi
}

while [[ $# -gt 0 ]]; do
  case "$1" in
    --foreground) FOREGROUND=1 ;;
    --dry-run)    DRY_RUN=1 ;;
    --strict)     STRICT=1 ;;
    -h|--help)    usage; exit 0 ;;
    *) usage; die "unknown option $1" ;;
  esac
  shift
done

[[ -f "$ROOT/ds41.env" ]] && source "$ROOT/ds41.env"
: "${DS41_MODEL:?set DS41_MODEL in ds41.env}"
: "${DS41_PYTHON:=$ROOT/.venv/bin/python}"
: "${DS41_GPUS_A:=0,1,2,3}" "${DS41_GPUS_C:=4,5,6,7}"
readonly PORT="${DS41_PORT:-8011}"
DS41_DSPARK="${DS41_DSPARK:-1}"
MAX_LEN=${DS41_MAX_LEN:-$((1024 * 1024))}

# ---- preflight
preflight() {
  local gpu missing=0
  [[ -d "$DS41_MODEL" ]] || die "no pack in $DS41_MODEL"
  for shard in 47 48; do
    [[ -f "$DS41_MODEL/model-000${shard}-of-00048.safetensors.sha256-ok" ]] || { warn "shard $shard"; missing=$((missing + 1)); }
  done
  for gpu in ${DS41_GPUS_A//,/ } ${DS41_GPUS_C//,/ }; do
    if nvidia-smi -i "$gpu" --query-compute-apps=pid --format=csv,noheader | grep -q .; then
      warn "GPU $gpu is not free"
    fi
  done
  ss -ltn | grep -q ":$PORT " && die "port $PORT is taken"
  local free
  free="$(awk '/MemAvailable/ {print int($2/1048576)}' /proc/meminfo)"
  (( free > 221 )) || warn "only ${free} GiB free"
}
command -v nvidia-smi >/dev/null && preflight

# ---- environment: every knob the published numbers were measured with
export CUDA_DEVICE_ORDER=PCI_BUS_ID
export CUDA_VISIBLE_DEVICES="$DS41_GPUS_A,$DS41_GPUS_C"
export VLLM_PP_LAYER_PARTITION=20,20
export VLLM_WORKER_MULTIPROC_METHOD=spawn HF_HUB_OFFLINE=1
export VLLM_ENGINE_READY_TIMEOUT_S=3600
export TORCH_CUDA_ARCH_LIST="7.0"
KNOBS=(
  VLLM_DS41_ENGRAM_RAM=1          # tables in hugepages
  VLLM_DS41_SLICED_PREFILL=1
  VLLM_DS41_PREFILL_SLICE_LAYERS=4
  VLLM_DS41_KV_FORMAT='fp4 packed'
)
for knob in "${KNOBS[@]}"; do export "$knob"; done
declare -x VLLM_DS41_GEMM_BUCKETS=$'16,64'

ARGS=(
  --model "$DS41_MODEL"
  --served-model-name deepseek-v4.1-flash
  --host "${DS41_HOST:-127.0.0.1}" --port "$PORT"
  --pipeline-parallel-size 2 --tensor-parallel-size 4   # the cut is VLLM_PP_LAYER_PARTITION
  --max-model-len "$MAX_LEN"
  --max-num-batched-tokens 1024 \
  --gpu-memory-utilization 0.943 --max-num-seqs 2
  --default-chat-template-kwargs '{"thinking": false}'
  --limit-mm-per-prompt "{\"image\": 64}"
  --enable-auto-tool-choice --tool-call-parser deepseek_v41
  --compilation-config '{"cudagraph_mode": "PIECEWISE"}'
)
if [[ "$DS41_DSPARK" == 1 ]]; then
  ARGS+=(--speculative-config '{"method": "dspark", "num_speculative_tokens": 5}')
  export VLLM_DS41_DRAFT_TAP_SCALE=0.0625
fi
CMD=("$DS41_PYTHON" -m vllm.entrypoints.openai.api_server "${ARGS[@]}" ${DS41_EXTRA_ARGS:-})

if (( DRY_RUN )); then
  printf '%q ' "${CMD[@]}"; echo
  exit 0
fi

if sudo -n true 2>/dev/null; then
  sudo nvidia-smi -lgc 1530 || true
fi
mkdir -p "$LOG_DIR"
if [[ $FOREGROUND -eq 1 ]]; then
  exec "${CMD[@]}"
fi
tmux has-session -t "$SESSION" 2>/dev/null && die "session $SESSION runs already"
tmux new-session -d -s "$SESSION" "$(printf '%q ' "${CMD[@]}") 2>&1 | tee -a $(printf %q "$LOG_DIR/serve.log")"
echo "attach: tmux attach -t $SESSION"
for _ in $(seq 900); do
  curl -sf "http://127.0.0.1:$PORT/health" >/dev/null && exit 0
  sleep 2
done
die "not healthy after 30 minutes"
