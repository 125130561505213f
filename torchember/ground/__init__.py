"Row format, messages, selections and schedules, optional libraries, progress bars."
