"Rows of tensors in a run, without the rows that torchember computes at the end of a step (gradient norms and learning rates)"
from torchember.ground.record import computed


def is_computed(row): return row.get('ttype')=='scalar' and row.get('tname') in computed


def lines(te): return [r for r in te.t.lines() if not is_computed(r)]


def df(te):
    "Return the table of a run without the rows that torchember computes at the end of a step, and without their columns"
    rows = te.t.df
    return rows[~((rows['ttype']=='scalar') & rows['tname'].isin(computed))].dropna(axis=1, how='all').reset_index(drop=True) if len(rows) else rows
