"From tensors that a model hands out to the lines of a log"
