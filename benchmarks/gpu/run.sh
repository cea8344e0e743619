#!/bin/sh
# All that needs a GPU, in one command, in less than nine minutes: builds the table for CUDA devices, checks it on this
# machine's GPU, again under compute-sanitizer where there is one, and measures it.
#
#   benchmarks/gpu/run.sh [OUTPUT_DIRECTORY]
#
# Writes check.txt, optimizers.txt, memcheck.txt, racecheck.txt and benchmark.json there (build/gpu/results where not
# said otherwise).
# KVTOOLS_GPU_BUILD names a directory that has been built already, elsewhere: then neither nvcc nor CMake is needed.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
build=${KVTOOLS_GPU_BUILD:-$root/build/gpu}
out=${1:-$root/build/gpu/results}
mkdir -p "$out"

if [ -z "${KVTOOLS_GPU_BUILD:-}" ]; then
  mkdir -p "$build"
  for tool in nvcc cmake; do
    command -v $tool >/dev/null || { echo "run.sh: $tool is not on the PATH. Install it, or name a build in KVTOOLS_GPU_BUILD." >&2; exit 1; }
  done
  cmake -S "$root" -B "$build" -DKVTABLE_PYTHON=OFF -DKVTABLE_BUILD_TESTS=ON -DCMAKE_BUILD_TYPE=Release \
    -DKVTOOLS_CUDA=on -DKVTOOLS_CUDA_ARCHITECTURES="${KVTOOLS_CUDA_ARCHITECTURES:-80-real;90}" >"$build/configure.log" 2>&1 ||
    { tail -20 "$build/configure.log" >&2; exit 1; }
  cmake --build "$build" --parallel 2 --target device_table_cuda_check device_optimizer_cuda_check device_table_benchmark >"$build/build.log" 2>&1 ||
    { tail -40 "$build/build.log" >&2; exit 1; }
fi
check=$build/kernels/tests/device_table_cuda_check
benchmark=$build/kernels/tests/device_table_benchmark

echo "run.sh: the table against a map, on the GPU"
status=0
timeout 120 "$check" >"$out/check.txt" 2>&1 || status=$?
cat "$out/check.txt"
grep -q "There is no CUDA device" "$out/check.txt" && { echo "run.sh: no GPU here: nothing was measured." >&2; exit 1; }
[ $status -eq 0 ] || { echo "run.sh: the check failed (status $status): see $out/check.txt" >&2; exit 1; }

echo "run.sh: optimizers against the CPU's, on the GPU"
timeout 90 "$build/kernels/tests/device_optimizer_cuda_check" >"$out/optimizers.txt" 2>&1 ||
  { tail -5 "$out/optimizers.txt" >&2; exit 1; }

for tool in memcheck racecheck; do
  echo "run.sh: the same, a small part, under compute-sanitizer --tool $tool"
  if ! command -v compute-sanitizer >/dev/null; then
    echo "unavailable: there is no compute-sanitizer on the PATH" | tee "$out/$tool.txt"
  elif timeout 90 compute-sanitizer --tool $tool --error-exitcode 9 "$check" small >"$out/$tool.txt" 2>&1; then
    tail -1 "$out/$tool.txt"
  else
    status=$?
    tail -5 "$out/$tool.txt"
    # 9 is a finding; any other status is the tool itself that this machine refuses.
    [ $status -ne 9 ] || exit 1
    echo "unavailable on this machine (status $status)" | tee -a "$out/$tool.txt"
  fi
done

echo "run.sh: the benchmark"
timeout 240 "$benchmark" >"$out/benchmark.json"
echo "run.sh: results are in $out"
