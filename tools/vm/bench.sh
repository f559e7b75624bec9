#!/bin/bash
# In the guest: `crossrail bench --transport verbs` and perftest's ib_write_bw in turns, both from NIC 0 to itself between two
# processes on one processor each. Emulated processors: what counts is the ratio.
set -eu
rounds=${1:-3}
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

# ours MEASURE: MB/s
ours() {
  crossrail bench --transport verbs --only "$1" --runs 3 --quick --pool-bytes 64M --cpus 0,1 --json "$out/ours.json" >/dev/null
  python - "$out/ours.json" <<'PY'
import json
import sys

(result,) = json.load(open(sys.argv[1]))["results"]
print(result["error"] or result["value"] * {"GB/s": 1000.0, "Mpages/s": 1024.0}[result["unit"]])
PY
}

for _ in $(seq "$rounds"); do
  echo "64 KiB, window 16: ib_write_bw $(bare 65536 400) MB/s, crossrail $(ours write-64k-w16) MB/s"
  echo "1 KiB pages: ib_write_bw $(bare 1024 6000 -t 128 -l 16) MB/s, crossrail $(ours paged-1k) MB/s"
done
