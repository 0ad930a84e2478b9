// main of the CUDA trainer: the engine and the transport that the program runs on.
#include "base/common.h"
#include "run/program.h"

int main(int argc, char **argv) {
    process_begin();
    program_spin_briefly(argv);
    return program_main(argc, argv, &cuda_engine, TRANSPORT_OR_NULL(nccl_transport));
}
