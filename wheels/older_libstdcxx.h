// Included before every source of a wheel (`make wheels`): lets what GCC 12 compiles run with the libstdc++ of GCC 11,
// which the Linuxes with glibc 2.34 have. Of all that this project uses, GCC 12 gave a new version to one symbol, and did
// so only because it is not noexcept any more: the one of old is still there, and the same function.
__asm__(
    ".symver _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE, "
    "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");
