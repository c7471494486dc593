/* version.cc: which toolkit is imitated: all that is compiled anew for each; its symbols are chosen by the linker. */
#include "sim.h"

int kvxsim_major(void) {
    return KVXSIM_VERSION_MAJOR;
}

int kvxsim_minor(void) {
    return KVXSIM_VERSION_MINOR;
}
