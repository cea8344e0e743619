#!/bin/sh
# All that needs a GPU, in one command, in less than nine minutes (with eight processors, in some four): builds the tables for CUDA devices, checks them on this
# machine's GPU (the C++ checks, the grid of tests/kernels through kvtools._device_table, a small part under
# compute-sanitizer), and measures them beside PyTorch.
#
#   benchmarks/gpu/run.sh [OUTPUT_DIRECTORY]
#
# Writes there (build/gpu/results where not said otherwise) what each part printed, checks.txt with how each ended, and one
# JSON file of all, named after the chip and the day. What cannot run says "unavailable: ..." and why; the rest goes on. The
# exit status is 0 where nothing failed.
#
# PYTHON names the interpreter (python3). KVTOOLS_GPU_BUILD names a directory that this script has built already, on another
# machine: then neither nvcc nor CMake is needed. KVTOOLS_GPU_ONLY_BUILD=1 builds, and does no more.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}
case $python in */*) python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python") ;; esac
build=${KVTOOLS_GPU_BUILD:-$root/build/gpu}
out=${1:-$root/build/gpu/results}
mkdir -p "$build" "$out"
build=$(cd "$build" && pwd)
out=$(cd "$out" && pwd)
begin=$(date +%s)
: >"$out/checks.txt"
rm -f "$out/failed"

# ended NAME OUTCOME
ended() {
  echo "run.sh: $1: $2"
  echo "$1: $2" >>"$out/checks.txt"
}

# failed NAME STATUS: says the end of what it printed.
failed() {
  tail -5 "$out/$1.txt" >&2
  if [ "$2" -eq 124 ]; then ended "$1" "failed: it ran out of time"; else ended "$1" "failed with status $2"; fi
  : >"$out/failed"
}

# Runs a command for so many seconds at most, and not beyond what is left of nine minutes.
within() {
  left=$((begin + 530 - $(date +%s)))
  [ "$left" -gt 1 ] || return 124
  [ "$1" -lt "$left" ] && left=$1
  shift
  timeout "$left" "$@"
}

# Why the grid cannot be built or run in Python; nothing where it can.
python_lacks() {
  command -v "$python" >/dev/null || { echo "there is no $python"; return; }
  "$python" - "$@" <<'END'
import importlib.util, os, sys, sysconfig
missing = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
if missing:
    print(f"Python has no {', '.join(missing)}")
elif "nanobind" in sys.argv and not os.path.exists(sysconfig.get_path("include") + "/Python.h"):
    print("Python's headers are not installed")
END
}

# device_table, ...: each C++ test that has a GPU's side is built as ..._cuda_check.
tests=$(cd "$root/kernels/tests" && grep -l KVTABLE_TEST_CUDA device_*_test.cc | sed 's/_test\.cc$//')

if [ -z "${KVTOOLS_GPU_BUILD:-}" ]; then
  for tool in nvcc cmake; do
    command -v $tool >/dev/null || { echo "run.sh: $tool is not on the PATH. Install it, or name a build in KVTOOLS_GPU_BUILD." >&2; exit 1; }
  done
  targets="device_table_benchmark training_step_benchmark $(for test in $tests; do echo "${test}_cuda_check"; done)"
  module=OFF
  [ -n "$(python_lacks nanobind)" ] || module=ON
  [ $module = OFF ] || targets="$targets kvtable_modules"
  cmake -S "$root" -B "$build" -DKVTABLE_PYTHON=$module -DPython_EXECUTABLE="$(command -v "$python")" -DKVTABLE_BUILD_TESTS=ON \
    -DCMAKE_BUILD_TYPE=Release -DKVTOOLS_CUDA=on -DKVTOOLS_CUDA_ARCHITECTURES="${KVTOOLS_CUDA_ARCHITECTURES:-80-real;90}" \
    >"$build/configure.log" 2>&1 || { tail -20 "$build/configure.log" >&2; exit 1; }
  # shellcheck disable=SC2086
  cmake --build "$build" --parallel "$(nproc)" --target $targets >"$build/build.log" 2>&1 || { tail -40 "$build/build.log" >&2; exit 1; }
  if [ $module = ON ]; then
    cmake --install "$build" --prefix "$build/site/kvtools" >>"$build/build.log" 2>&1 || { tail -5 "$build/build.log" >&2; exit 1; }
    cp "$root/kvtools/__init__.py" "$build/site/kvtools/"
  fi
fi
[ -z "${KVTOOLS_GPU_ONLY_BUILD:-}" ] || exit 0
programs=$build/kernels/tests

# check NAME SECONDS PROGRAM [ARGUMENT...]: one that exits 0 where all is well. In the background: no check measures, so all
# run at once.
check() {
  echo "run.sh: $1 ..."
  check_it "$@" &
}
check_it() {
  name=$1
  seconds=$2
  shift 2
  code=0
  within "$seconds" "$@" >"$out/$name.txt" 2>&1 || code=$?
  if [ $code -eq 0 ]; then ended "$name" "passed"; else failed "$name" $code; fi
}

for test in $tests; do
  check "$test" 180 "$programs/${test}_cuda_check"
done

# In $out, where no other kvtools lies beside.
on_site() {
  env -C "$out" PYTHONPATH="$build/site:$root/tests/kernels" "$@"
}
lacks=$(python_lacks numpy ml_dtypes pytest)
[ -n "$lacks" ] || [ -d "$build/site/kvtools" ] || lacks="kvtools._device_table was not built. $(python_lacks nanobind)"
[ -n "$lacks" ] || lacks=$(on_site "$python" - 2>&1 <<'END' | tail -1
import kvtools._device_table
from device_arrays import DEVICES
if "cuda" not in DEVICES:
    print("neither CuPy nor PyTorch is there and sees the GPU")
END
)
if [ -n "$lacks" ]; then
  ended "grid" "unavailable: $lacks"
else
  check "grid" 180 env -C "$out" PYTHONPATH="$build/site" "$python" -m pytest -q -p no:cacheprovider -k "cuda or gpu" \
    -c "$root/pyproject.toml" --rootdir "$root" --confcutdir "$root/tests/kernels" \
    "$root/tests/kernels/test_device_grid.py" "$root/tests/kernels/test_device_table.py" \
    "$root/tests/kernels/test_device_eviction.py"
fi

sanitize() {
  code=0
  within 150 compute-sanitizer --tool "$1" --error-exitcode 9 "$programs/device_table_cuda_check" small >"$out/$1.txt" 2>&1 || code=$?
  case $code in
    0) ended "$1" "passed" ;;
    9) failed "$1" 9 ;;  # a finding
    124) ended "$1" "unavailable: it ran out of time" ;;
    *) ended "$1" "unavailable: this machine refuses compute-sanitizer (status $code)" ;;
  esac
}
for tool in memcheck racecheck; do
  if ! command -v compute-sanitizer >/dev/null; then
    ended "$tool" "unavailable: there is no compute-sanitizer on the PATH"
  else
    sanitize $tool &
  fi
done

wait
if grep -q "There is no CUDA device" "$out"/*.txt; then
  echo "run.sh: no GPU here: nothing was measured." >&2
  exit 1
fi

# measure NAME SECONDS PROGRAM: one that prints JSON.
measure() {
  echo "run.sh: $1 ..."
  code=0
  name=$1
  seconds=$2
  shift 2
  within "$seconds" "$@" >"$out/$name.json" 2>"$out/$name.txt" || code=$?
  [ $code -eq 0 ] || { failed "$name" $code; return; }
  reason=$(sed -n 's/.*"unavailable": "\(.*\)"}$/\1/p' "$out/$name.json")
  ended "$name" "${reason:+unavailable: }${reason:-passed}"
}

measure "training_step" 60 "$programs/training_step_benchmark"
if command -v "$python" >/dev/null; then
  measure "torch_step" 60 "$python" "$root/benchmarks/gpu/torch_step.py"
else
  ended "torch_step" "unavailable: there is no $python"
fi
if [ -d "$build/site/kvtools" ]; then
  measure "kernels" 60 env -C "$out" PYTHONPATH="$build/site" "$python" "$root/benchmarks/gpu/kernels.py"
else
  ended "kernels" "unavailable: kvtools._device_table was not built"
fi
measure "benchmark" 200 "$programs/device_table_benchmark"

if command -v "$python" >/dev/null; then
  echo "run.sh: all results are in $("$python" "$root/benchmarks/gpu/merge.py" "$out")"
else
  echo "run.sh: results are in $out; benchmarks/gpu/merge.py makes one file of them where there is Python"
fi
[ ! -e "$out/failed" ]
