// main of the CPU trainer: the engine and the transport that the program runs on.
#include "base/common.h"
#include "run/program.h"

int main(int argc, char **argv) {
    process_begin();
    program_spin_briefly(argv);
    return program_main(argc, argv, &cpu_engine, TRANSPORT_OR_NULL(mpi_transport));
}
