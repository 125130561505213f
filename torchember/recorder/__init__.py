"What an armed model tells, gathered step by step, and turned into rows"
