"Tensors to numbers: summaries, statistics, spectra, taps. No files, no modules."
