"Model to taps. Never measures"
