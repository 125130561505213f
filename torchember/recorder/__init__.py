"Events of an armed model are collected step by step and become rows."
