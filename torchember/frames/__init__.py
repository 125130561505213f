"Logs as tables"
