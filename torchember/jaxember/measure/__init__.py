"Summaries of arrays inside compiled JAX code"
