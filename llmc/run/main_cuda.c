// main of the CUDA trainer. It chooses the engine and the transport.
#include "run/program.h"

int main(int argc, char **argv) {
    program_begin(argv);
    return program_main(argc, argv, &cuda_engine, TRANSPORT_OR_NULL(nccl_transport));
}
