/* fuzz_sealed.c: the program of fuzz_serve.c over sealed connections: its frames, right and wrong ones, travel in
 * records that are cut anywhere, and records are damaged too. What an owner promises is the same. */
#define SEALED 1
#include "fuzz_serve.c"
