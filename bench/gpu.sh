#!/usr/bin/env bash
# Everything that wants a GPU, in one go of less than 8 minutes, without a network and without an installation:
#   bash bench/gpu.sh OUT                                    or with $OUT set
#   DEVICE=cpu SIZE=tiny bash bench/gpu.sh /tmp/out          the same script on a CPU, small
# (1) gradients against eager autograd, fp32 and bf16; (2) bench.step in bf16, torch.compile's default mode and
# reduce-overhead; (3) a training run with the time that is left. A part that outlasts its share is cut, and leaves what
# it has: JSON of each part, gpu.md with all tables, log.txt. Tables and pictures: python -m bench.step --remake JSON.
set -u
out=${1:-${OUT:?name a folder for the results}}
device=${DEVICE:-cuda}
size=${SIZE:-300M}
python=${PYTHON:-python3}
total=${SECONDS_IN_ALL:-460}
if [ "$device" = cpu ]; then
  image=8 T=4 batch=4 group=2 compiler=eager modes="default" rounds=2 check="ours"
else
  image=32 T=${T:-8} batch=${BATCH:-128} group=8 compiler=inductor modes="default reduce-overhead" rounds=10
  check="exact-unrolled,ours,shut,known,batched,group,recompute"
fi
# In the order in which they matter, should there be no time for all.
contenders=${CONTENDERS:-exact-steps,exact-steps-eager,ours,author,half,known,exact-unrolled-eager,batched-W4,open-W4}

root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$out"
out=$(cd "$out" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# As an installation lays it out: passes/ and models/ are parts of jagg_fx.
cp -r "$root/jagg_fx" "$root/bench" "$work"
rm -rf "$work/jagg_fx/passes" "$work/jagg_fx/models"
cp -r "$root/passes" "$root/models" "$work/jagg_fx"
export PYTHONPATH=$work PYTHONUNBUFFERED=1 TORCHINDUCTOR_CACHE_DIR=$work/cache
cd "$work" || exit 1

began=$(date +%s)
left() { echo $((total - $(date +%s) + began)); }
# part SECONDS NAME COMMAND...: cut after that long, or when 5 seconds of all are left.
part() {
  local most=$1 name=$2 code=0 have
  shift 2
  have=$(($(left) - 5))
  [ "$have" -lt "$most" ] && most=$have
  if [ "$most" -lt 10 ]; then
    echo "== $name: no time left" | tee -a "$out/log.txt"
    return
  fi
  echo "== $name: at most $most s: $*" | tee -a "$out/log.txt"
  timeout -k 5 "$most" "$@" >>"$out/log.txt" 2>&1 || code=$?
  [ "$code" = 0 ] || failed="$failed $name($code)"
  echo "== $name: exit $code, $(left) s left" | tee -a "$out/log.txt"
}

failed=
: >"$out/log.txt"
common="--device $device --compiler $compiler --image $image --batch $batch --T $T"
# shellcheck disable=SC2086
{
  part $((total * 25 / 100)) check "$python" -m bench.gpu_check --device "$device" --compiler "$compiler" --size tiny \
    --image "$image" --contenders "$check" --out "$out"
  share=42
  for mode in $modes; do
    part $((total * share / 100)) "step-$mode" "$python" -m bench.step $common --size "$size" --dtype bf16 --W 4,8 \
      --mode "$mode" --rounds "$rounds" --usual-cache --minutes "$(awk "BEGIN {print $total * $share / 11000}")" \
      --contenders "$contenders" --name "step-gpu-$mode" --out "$out"
    share=18
    contenders=exact-steps,ours,known
  done
  seconds=$(($(left) - 20))
  part "$total" train "$python" -m bench.gpu_train $common --size "$size" --group "$group" --dtype bf16 \
    --seconds $((seconds > 150 ? 150 : seconds)) --out "$out"
}
cd "$out" || exit 1
for file in gpu-check.md step-gpu-*.md gpu-train.md; do
  [ -f "$file" ] && { cat "$file"; echo; rm "$file"; }
done >gpu.md
rm -f step-gpu-*.png
cat gpu.md
[ -z "$failed" ] || { echo "cut or failed:$failed"; exit 1; }
