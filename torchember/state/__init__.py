"Snapshots of a model that you can do arithmetic on, and what they tell"
