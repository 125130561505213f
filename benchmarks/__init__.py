"Benchmarks of the cost of torchember: `make bench`, or `python -m benchmarks --list`"
