"Turn the execution of a model into events for listeners: module names, replaced methods, hooks, optimizers, compiled code"
