#!/bin/sh
# Builds the C++ tests of the table engine and runs them: plain, under AddressSanitizer and UndefinedBehaviorSanitizer,
# and under ThreadSanitizer.
#
#   sanitize.sh [BUILD_DIRECTORY [CMAKE]]
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
build=${1:-$root/build/sanitize}
cmake=${2:-cmake}
mkdir -p "$build"
for sanitizer in none address,undefined thread; do
  directory=$build/$(echo "$sanitizer" | tr ',' '-')
  if [ "$sanitizer" = none ]; then flags="" type=Release; else flags=$sanitizer type=Debug; fi
  "$cmake" -S "$root" -B "$directory" -DKVTABLE_PYTHON=OFF -DKVTOOLS_CUDA=off -DKVTABLE_WERROR=ON -DKVTABLE_BUILD_TESTS=ON \
    -DKVTABLE_SANITIZE="$flags" -DCMAKE_BUILD_TYPE="$type" >"$directory.log" 2>&1 ||
    { cat "$directory.log"; exit 1; }
  "$cmake" --build "$directory" --parallel 2
  for test in "$directory"/kernels/tests/*_test; do
    echo "$(basename "$test") ($sanitizer)"
    "$test" || { echo "FAILED. Run it alone: $test"; exit 1; }
  done
done
