"What torchember costs: `make bench`, or `python -m benchmarks --list`"
