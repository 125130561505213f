"Row to disk, and back"
