// main of the CPU trainer. It chooses the engine and the transport.
#include "run/program.h"

int main(int argc, char **argv) {
    program_begin(argv);
    return program_main(argc, argv, &cpu_engine, TRANSPORT_OR_NULL(mpi_transport));
}
