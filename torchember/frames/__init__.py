"Read logs of runs as tables"
