"Rows about attention, routers and the residual stream of two processes are merged into one table."
import numpy as np
import programs
import pytest

from torchember import read

program = '''
import sys, torch
from torch import distributed as dist, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torchember import torchEmber
dist.init_process_group('gloo')
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q,self.gate,self.num_experts = nn.Linear(4, 4),nn.Linear(4, 3),3
    def forward(self, x):
        best = self.gate(x).topk(1, dim=-1).values
        return x+best*F.scaled_dot_product_attention(self.q(x), x, x)
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(Block(), Block()))
te = torchEmber(model, torch.optim.SGD(model.parameters(), .1), attention=True, routers=True, stream=True, name='both', home=sys.argv[1])
torch.manual_seed(dist.get_rank())
model(torch.randn(2+dist.get_rank(), 3, 10, 4)).mean().backward()
te.recorder.watch.optimizers[0].step()
te.close()

class Attention(nn.Module):
    "Attention with four heads of size 4"
    def __init__(self):
        super().__init__()
        for name in 'qkvo': setattr(self, name, nn.Linear(16, 16))
    def forward(self, x):
        q,k,v = (f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
torch.manual_seed(0)
net,x = Attention(),torch.randn(3, 10, 16)
def record(name):
    te = torchEmber(net, attention=True, name=name, home=sys.argv[1])
    net(x).mean().backward()
    te.close()
record('whole')
parallelize_module(net, init_device_mesh('cpu', (2,)), {**{name: ColwiseParallel() for name in 'qkv'}, 'o': RowwiseParallel()})
record('split')
dist.barrier()
dist.destroy_process_group()
'''


@pytest.mark.slow
@pytest.mark.filterwarnings('error::torchember.EmberWarning')
def test_rows_of_two_ranks_are_merged(tmp_path):
    (tmp_path/'program.py').write_text(program.replace('sys.argv[1]', repr(str(tmp_path))))
    programs.ranks(tmp_path/'program.py')
    place = ['path', 'tname']
    for ttype,rows,merged in (
            ('attention', 6, dict(entropy='mean', future='mean', value_rms='mean', logit_max='max', logit_bound='max')),
            ('router', 8, dict(entropy='mean', top_share='mean', load='mean', tokens='mean')),
            ('stream', 2, dict(rms_input='mean', added='mean', largest='max', median_ratio='max', numel='sum'))):
        each,both = (read('both', home=tmp_path, ttype=ttype, per_rank=p).set_index(place) for p in (True, False))
        assert len(each)==2*rows and len(both)==rows
        for column,how in merged.items():
            want = each.groupby(place)[column].agg(how)
            np.testing.assert_allclose(both[column].astype(float).sort_index(), want.astype(float).sort_index(), rtol=1e-6, err_msg=column)
    squares = (each.rms**2*each.numel).groupby(place).sum()/each.numel.groupby(place).sum()
    np.testing.assert_allclose(both.rms.sort_index(), squares.sort_index()**.5, rtol=1e-6)
    # with tensor parallelism, each rank has rows only of its own attention heads
    columns = ['tname', 'logit_max', 'logit_bound', 'entropy', 'first_token', 'future', 'value_rms']
    whole,split = (read(name, home=tmp_path, ttype='attention').sort_values('tname')[columns] for name in ('whole', 'split'))
    assert whole.tname.tolist()==split.tname.tolist()==[f'head_{i}' for i in range(4)]
    np.testing.assert_allclose(split[columns[1:]].astype(float), whole[columns[1:]].astype(float), rtol=1e-4)
