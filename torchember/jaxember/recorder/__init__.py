"What a JAX step tells becomes rows"
