"Model to events: names, patches, hooks, optimizers, compiled code. Measures nothing"
