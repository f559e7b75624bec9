#!/bin/bash
# on the device machine, in the repository's root
export PYTHONPATH=/tmp/site PYTHONUNBUFFERED=1
began=$SECONDS
say() { echo "== $((SECONDS - began)) s: $*"; }
nvidia-smi --query-gpu=name,driver_version,memory.used --format=csv,noheader
python3 -c "import crossrail, torch; print(crossrail.__version__, torch.__version__)" || exit 1
one() { local limit=$1 name=$2; shift 2
  CUDA_DEVICE_MAX_CONNECTIONS=32 timeout $limit python3 -m pytest -q -p no:cacheprovider -p no:benchmark --durations=4 "$@" >$OUT/$name.log 2>&1
  local rc=$?; say "$name rc $rc: $(grep -E '(passed|failed|error)' $OUT/$name.log | tail -1)"
  grep -E '^(FAILED|ERROR)' $OUT/$name.log | cut -c1-300; }
if [[ $1 == tests ]]; then
  one 90 vmm tests/hw/test_gpu_vmm.py
  one 60 memory tests/hw/test_gpu_memory.py tests/hw/test_gpu_words.py tests/hw/test_gpu_graph.py
  one 90 moe tests/hw/test_gpu_moe.py tests/hw/test_gpu_moe_graph.py
  one 60 weights tests/hw/test_gpu_weights.py
fi
export CUDA_MPS_PIPE_DIRECTORY=/tmp/mps CUDA_MPS_LOG_DIRECTORY=/tmp/mpslog; mkdir -p /tmp/mps /tmp/mpslog
nvidia-cuda-mps-control -d; sleep 1
if [[ $1 == tests ]]; then one 120 processes tests/hw/test_gpu_moe_processes.py; fi
timeout 120 python3 benchmarks/moe_graph.py --ranks 2 4 >$OUT/bench.log 2>&1; say "bench rc $?"; tail -15 $OUT/bench.log
echo quit | nvidia-cuda-mps-control
say done
