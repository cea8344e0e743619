#!/bin/sh
# Builds the C++ tests of the table engine in one way, and runs them: all, or those that are named.
#
#   run.sh WAY DIRECTORY CMAKE [TEST...]
#
# WAY is plain, address (AddressSanitizer and UndefinedBehaviorSanitizer) or thread (ThreadSanitizer). A plain build goes on
# in DIRECTORY as it is configured there: `make setup` has built the engine in build/setup already.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
way=$1 directory=$2 cmake=$3
shift 3
case $way in
  plain) sanitize="" type=Release ;;
  address) sanitize=address,undefined type=Debug ;;
  thread) sanitize=thread type=Debug ;;
  *) echo "run.sh: WAY is plain, address or thread, got $way" >&2; exit 2 ;;
esac
mkdir -p "$directory"
if [ "$way" != plain ] || [ ! -f "$directory/CMakeCache.txt" ]; then
  # The Ninja that is installed with that CMake. --fresh: the folder may be of another generator, make.
  "$cmake" --fresh -G Ninja -DCMAKE_MAKE_PROGRAM="$(cd "$(dirname "$cmake")" && pwd)/ninja" -S "$root" -B "$directory" \
    -DKVTABLE_PYTHON=OFF -DKVTOOLS_CUDA=off -DKVTABLE_WERROR=ON -DKVTABLE_BUILD_TESTS=ON \
    -DKVTABLE_SANITIZE="$sanitize" -DCMAKE_BUILD_TYPE="$type" >"$directory.log" 2>&1 ||
    { cat "$directory.log"; exit 1; }
fi
"$cmake" --build "$directory" --parallel "$(nproc)" --target "${@:-kvtable_tests}" >"$directory.log" 2>&1 ||
  { cat "$directory.log"; exit 1; }
if [ $# = 0 ]; then set -- "$directory"/kernels/tests/*_test; fi
# As many at once as there are processors; each says what it printed when it has ended.
printf '%s\n' "$@" | xargs -n 1 -P "$(nproc)" sh -c '
  directory=$1 way=$2 name=$(basename "$3")
  test=$directory/kernels/tests/$name
  if printed=$("$test" 2>&1); then
    printf "%s\n" "$name ($way)" ${printed:+"$printed"}
  else
    printf "%s\n" "$name ($way)" "$printed" "FAILED. Run it alone: $test"
    exit 255  # and xargs starts no other
  fi
' run "$directory" "$way"
