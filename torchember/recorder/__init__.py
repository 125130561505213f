"Collect the events of a model during training, step by step, and convert them to rows of the log."
