#!/bin/bash
# In the guest: `crossrail bench --transport verbs` from NIC 0 to itself between two processes on one processor each, beside
# bare loops of its own over libibverbs, and in turns with perftest's ib_write_bw. Emulated processors: what counts is the
# ratio. bench.sh [ROUNDS] [MEASURE...]
set -eu
rounds=${1:-3}
measures=("${@:2}")
((${#measures[@]})) || measures=(write-64k-w16 write-1m-w16 paged-1k paged-64k ping-pong)
out=$(mktemp -d)

# bare BYTES ITERATIONS OPTIONS...: MB/s of ib_write_bw
bare() {
  local bytes=$1 iterations=$2
  shift 2
  local options=(-d rxe0 -x 1 -s "$bytes" -n "$iterations" -t 16 --report_gbits "$@")
  taskset -c 0 ib_write_bw "${options[@]}" >"$out/server" 2>&1 &
  sleep 1
  taskset -c 1 timeout 60 ib_write_bw "${options[@]}" 127.0.0.1 2>&1 | awk -v bytes="$bytes" '$1 == bytes {print $4 * 1000 / 8}'
  wait
}

# ours MEASURE: its line, with what stands beside it
ours() {
  crossrail bench --transport verbs --only "$1" --runs 3 --quick --pool-bytes 64M --cpus 0,1 --json "$out/ours.json" >/dev/null
  python - "$out/ours.json" <<'PY'
import json
import sys

for result in json.load(open(sys.argv[1]))["results"]:
    beside = f", {result['limit_is']} {result['limit']:.4g}, ratio {result['ratio']:.3f}" if result["limit"] else ""
    print(f"{result['title']}: " + (result["error"] or f"{result['value']:.4g} {result['unit']}{beside}"))
PY
}

for _ in $(seq "$rounds"); do
  echo "ib_write_bw 64 KiB, 16 in flight: $(bare 65536 400) MB/s; 1 KiB: $(bare 1024 6000 -t 128 -l 16) MB/s"
  for measure in "${measures[@]}"; do ours "$measure"; done
done
