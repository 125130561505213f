"Compute summaries, statistics and eigenvalues of tensors"
