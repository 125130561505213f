"Logs of several ranks merged into one table"
