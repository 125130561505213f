"Merge the logs of several ranks into one table"
