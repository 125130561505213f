"Write the rows of a run to disk, and read them back"
