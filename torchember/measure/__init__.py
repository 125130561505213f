"Compute summaries, statistics and spectra of tensors"
