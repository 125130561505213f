"Convert the measurements of a JAX step to rows."
