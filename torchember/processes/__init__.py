"What several processes of a training have, as that of one"
