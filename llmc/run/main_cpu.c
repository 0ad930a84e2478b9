// main of the CPU trainer: the engine and the transport that the program runs on.
#include "run/program.h"

int main(int argc, char **argv) {
    program_begin(argv);
    return program_main(argc, argv, &cpu_engine, TRANSPORT_OR_NULL(mpi_transport));
}
