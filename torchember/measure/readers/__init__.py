"Who reads a tensor: compiled loops, Triton"
