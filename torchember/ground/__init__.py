"The words that all rooms share: rows, messages, choices, what is missing, progress"
