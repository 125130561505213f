"Turn the execution of a model into events for listeners: names, patches, hooks, optimizers, compiled code"
