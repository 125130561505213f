"Readers: compiled loops for the CPU, Triton kernels for GPUs, torch operations for the rest."
