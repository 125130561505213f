"Pictures that follow a run"
