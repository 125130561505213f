"Collect the events of an armed model step by step, and convert them to rows of the log."
