# Both trainers in a container: docker build -t gns . ; the CPU trainer alone: docker build --target cpu -t gns .
# docker run --rm -it -v "$PWD/runs:/gns/runs" gns ./train_gpt2 --help ; on a GPU add --gpus all (NVIDIA's container toolkit).
FROM debian:12 AS cpu
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates curl gcc git libc6-dev libcjson-dev libopenmpi-dev \
    libxxhash-dev make openmpi-bin procps python3-venv && rm -rf /var/lib/apt/lists/*
WORKDIR /gns
COPY . .
RUN make -j2 NATIVE=0 train_gpt2 data/tokenize

FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS cuda
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates curl g++ git libc6-dev libcjson-dev libopenmpi-dev \
    libxxhash-dev make openmpi-bin procps python3-venv && rm -rf /var/lib/apt/lists/*
WORKDIR /gns
COPY . .
RUN make -j2 NATIVE=0 train_gpt2 data/tokenize && make -j4 NATIVE=0 train_gpt2cu
