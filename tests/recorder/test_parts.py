"Parts of tensors on a rank, and passes that train nothing: placements, ratios of shards, a pipeline stage that finds out shapes."
import json
import sys
from pathlib import Path

import programs
import pytest
import torch

libraries = 'from contextlib import suppress\nwith suppress(ImportError): import torch.distributed.fsdp, torch.distributed.tensor, torch.distributed.pipelining'
pytestmark = pytest.mark.skipif(not torch.distributed.is_available() or sys.platform=='win32', reason='needs torch.distributed with gloo')

calls = '''
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
mesh,x = init_device_mesh('cpu', (2,)),torch.arange(12.).reshape(4, 3)
class Calls(nn.Module):
    def __init__(self): super().__init__(); self.act = nn.ReLU()
    def forward(self, whole):
        for w in whole: self.act(x if w else distribute_tensor(x, mesh, [Shard(0)]))
model = Calls()
for whole in ((0, 1), (1, 0), (1, 0)):
    te = torchEmber(model, ttypes=('output',), stats=['shape', 'max'])
    for _ in range(2): model(whole)
    done[str(len(done))] = [(r['step'], r['call'], r.get('placement'), r.get('global_shape'), r['shape']) for r in te.t.lines()]
    te.close()
'''
ratios = '''
from torch.distributed.fsdp import fully_shard
model = nn.Linear(3, 4, bias=False)
with torch.no_grad(): model.weight.copy_(torch.tensor([[1.]*3]*2+[[10.]*3]*2))
fully_shard(model)
opt = torch.optim.SGD(model.parameters(), .1)
te = torchEmber(model, optimizer=opt, ttypes=('weight', 'update'), stats=['rms'])
for _ in range(2):
    model(torch.ones(2, 3)).sum().backward()
    opt.step()
    opt.zero_grad()
te.close()
done['rows'] = [(r['step'], r['ttype'], r['rms'], r.get('ratio'), r.get('placement')) for r in te.t.lines() if r['ttype']!='scalar']
'''
pipeline = '''
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
model = nn.Sequential(nn.Linear(4, 4))
opt = torch.optim.SGD(model.parameters(), .1)
te = torchEmber(model, optimizer=opt, stats=['numel', 'max'], ttypes=('input', 'output_grad'))
schedule = ScheduleGPipe(PipelineStage(model, rank, 2, torch.device('cpu')), 2, loss_fn=lambda y, t: (y-t).square().mean())
for i in range(2):
    schedule.step(torch.full((6, 4), i+2.)) if rank==0 else schedule.step(target=torch.ones(6, 4))
    opt.step()
    opt.zero_grad()
report = te.close()
done['rows'] = [(r['step'], r['module'], r['ttype'], r['call'], r['numel'], r['max']) for r in te.t.lines() if r['ttype']!='scalar']
done['steps'] = report['steps']
'''


def ran(code, folder):
    "Run `code` in two processes. Return the dict `done` of each process."
    script = folder/'script.py'
    script.write_text('import json, torch\nfrom pathlib import Path\nfrom torch import distributed as dist, nn\nfrom torchember import torchEmber\n'
        f"dist.init_process_group('gloo')\nrank,done = dist.get_rank(),{{}}\ntorch.manual_seed(0)\n{code}\n"
        "Path(__file__).with_name(f'{rank}.json').write_text(json.dumps(done))\ndist.barrier()\ndist.destroy_process_group()\n")
    programs.ranks(script, after=libraries)
    return [json.loads(Path(folder/f'{r}.json').read_text()) for r in range(2)]


@pytest.mark.slow
def test_each_call_has_its_placement(tmp_path):
    "One call gets a shard and another call a whole tensor, in either order. Each row has its own placement."
    pytest.importorskip('torch.distributed.tensor')
    whole,part = (None, None, [4, 3]),('S(0)', [4, 3], [2, 3])
    for done in ran(calls, tmp_path):
        for got,order in zip(done.values(), ((part, whole), (whole, part), (whole, part)), strict=True):
            assert [tuple(r) for r in got]==[(s, c, *order[c]) for s in range(2) for c in range(2)]


@pytest.mark.slow
def test_the_ratio_of_a_shard_is_to_the_shard_of_its_weight(tmp_path):
    "FSDP2 has whole weights in the forward, and updates shards. Each rank's update ratio uses the weights of its own shard."
    pytest.importorskip('torch.distributed.tensor')
    for done,weight in zip(ran(ratios, tmp_path), (1, 10), strict=True):
        assert [(s, t, p) for s,t,_,_,p in done['rows']]==[(s, *r) for s in range(2) for r in (('weight', None), ('update', 'S(0)'))]
        got = [(rms, ratio) for _,t,rms,ratio,_ in done['rows'] if t=='update']
        assert got==[(pytest.approx(.2, rel=1e-5), pytest.approx(.2/(weight-.2*i), rel=1e-5)) for i in range(2)]


@pytest.mark.slow
def test_a_stage_that_asks_for_shapes_trains_nothing(tmp_path):
    "A pipeline stage first runs the model with made-up inputs to find out shapes. Only the micro-batches are recorded."
    pytest.importorskip('torch.distributed.pipelining')
    first,last = ran(pipeline, tmp_path)
    modules = 'model(Sequential)','model(Sequential).0(Linear)'
    assert [r for r in first['rows'] if r[2]=='input']==[[s, m, 'input', 0, 24, s+2.] for s in range(2) for m in modules]
    for done in (first, last):
        assert done['steps']==2 and [r[:5] for r in done['rows'] if r[2]=='input']==[[s, m, 'input', 0, 24] for s in range(2) for m in modules]
        grads = [r[:5] for r in done['rows'] if r[2]=='output_grad']
        assert sorted(grads)==sorted([s, m, 'output_grad', 0, 24] for s in range(2) for m in modules)
