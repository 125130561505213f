"Live pictures of a run"
