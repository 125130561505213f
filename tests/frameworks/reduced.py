"""Program of `test_reduce.py` for 2 or 4 processes: train models with `reduce='step'`. Rank 0 stores the rows received meanwhile.

    python -m torch.distributed.run --nproc_per_node=4 reduced.py FOLDER CASE ..."""
import json
import sys
from pathlib import Path

import ranked
from torch import distributed as dist

from torchember import torchEmber
from torchember.processes.whole_steps import StepCollector

StepCollector.patience = 20. # On a busy machine, a rank may need more than the 2 s that a usual run waits


class Heard(torchEmber):
    "Listener on rank 0 that stores all rows it receives"
    def __init__(self, *args, **kwargs):
        super().__init__(*args, reduce='step', **kwargs)
        self.told = []
        if ranked.rank==0: self.t.listen(lambda step, rows: self.told.append((step, rows)))

    def close(self):
        report = super().close()
        if ranked.rank==0: (ranked.folder/f'{ranked.name}.told').write_text(json.dumps([self.told, report["remarks"]]))
        return report


if __name__=='__main__':
    ranked.folder,ranked.torchEmber,ranked.reference = Path(sys.argv[1]),Heard,lambda *args: None
    dist.init_process_group('gloo')
    for name in sys.argv[2:]:
        f,worlds = ranked.cases[name]
        if ranked.world not in worlds: continue
        ranked.name = f'{name}_{ranked.world}'
        f()
        dist.barrier()
    dist.destroy_process_group()
