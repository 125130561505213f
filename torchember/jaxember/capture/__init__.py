"Modules, tags and parameter names of JAX programs."
