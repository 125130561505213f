"A JAX program tells: modules, marks on values, names of parameters"
