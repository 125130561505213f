"Tensor to numbers. Never touches disk or modules"
