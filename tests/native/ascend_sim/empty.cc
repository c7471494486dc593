/* empty.cc: libhcomm.so and liberror_manager.so of the simulator: there so that "is it loaded" can be answered. */
extern "C" __attribute__((visibility("default"))) const char *kvxsim_placeholder(void);

const char *kvxsim_placeholder(void) {
    return "KVXSim910 (simulated)";
}
