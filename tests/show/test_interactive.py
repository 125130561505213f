"Interactive pictures in a real JupyterLab, where a browser moves controls and pointer"
import time
from functools import cache

import pytest
from jupyter import Notebook, server, window
from test_live import program

RUN = '''
import os, tempfile, torch, torchember
os.environ['TORCHEMBER_HOME'] = tempfile.mkdtemp(dir=os.path.abspath('.'))
from torchember import exp_hist, interactive, scalar_global_heatmap, scalar_line, torchEmber
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
x = torch.randn(64, 8)
with torchEmber(model, optimizer=opt, stats='numerics', ttypes=('output', 'output_grad', 'weight'), name='small') as te:
    for _ in range(20):
        loss = (model(x)-x[:, :2].sin()).square().mean()
        loss.backward(); opt.step(); opt.zero_grad()
        te.log(loss=loss)
'''


def until(f, wanted, seconds=60):
    "Wait until `f()` returns the wanted value"
    end = time.monotonic()+seconds
    while (got := f())!=wanted and time.monotonic()<end: time.sleep(.1)
    assert got==wanted


class Page:
    "A notebook with an interactive picture, and functions that send events to its figures"
    def __init__(self, nb): self.nb = nb

    def prints(self, code, wanted, of='views[0]'):
        "Check the output of an expression in the kernel, while no drawing is in progress"
        until(lambda: self.nb.ask(f'with {of}.lock: print({code})'), wanted)

    def place(self, surface, x, y=None, axes=0):
        "Return a position in the axes of a figure as pixels of the page; without y, at half height. surface: index of the figure"
        i = surface.partition('.')[0]
        n = int(self.nb.ask(f"print([s for v in views for s in ([v.cursor.loss] if v.cursor else [])+[v.picture]].index({surface}))"))
        to,y = ('get_xaxis_transform()', .5) if y is None else ('transData', y)
        code = f"with {i}.lock: f = {surface}.surface.figure; print(*f.axes[{axes}].{to}.transform(({x}, {y})), f.bbox.height, f.canvas.device_pixel_ratio)"
        px,py,height,ratio = map(float, self.nb.ask(code).split())
        canvas = self.nb.page.locator('.jupyter-matplotlib-canvas-div').nth(n)
        canvas.scroll_into_view_if_needed()
        box = None
        # Wait until the position is stable: cells above get their height when they become visible
        while box!=(box := canvas.bounding_box()): self.nb.page.wait_for_timeout(200)
        return box['x']+px/ratio, box['y']+(height-py)/ratio

    def hover(self, *where): self.nb.page.mouse.move(*self.place(*where))
    def click(self, *where, button='left'): self.nb.page.mouse.click(*self.place(*where), button=button)

    def pixels(self, n):
        "Return the image of a figure on the page"
        return self.nb.page.evaluate("n => document.querySelectorAll('.jupyter-matplotlib-canvas-div')[n].querySelector('canvas').toDataURL()", n)

    def good(self):
        assert self.nb.bad==[]
        assert self.nb.page.locator('.Toastify__toast, .jp-Dialog').count()==0


@pytest.fixture(scope='module')
def lab(chromium, tmp_path_factory):
    "Return a function that opens a window of a shared JupyterLab: `lab(2)` has two device pixels for each pixel"
    with server(tmp_path_factory.mktemp('lab')) as lab:
        @cache
        def screen(dpr): return window(chromium('EXCLUDE 127.0.0.1'), lab, device_scale_factor=dpr)
        yield screen


@pytest.mark.slow
@pytest.mark.parametrize('dpr', [1, pytest.param(2, marks=[pytest.mark.slow, pytest.mark.release])])
def test_the_pointer_moves_the_cross_hair(lab, dpr):
    cells = ['%matplotlib widget', RUN, "a = interactive(scalar_line, df=te, layer=['0', '2'], tt='Gradient', scalar_metric=['std', 'rm2'], width=900)\na",
        "b = interactive(exp_hist, df=te, layer='2', dtype_annotation='float8_e4m3fn', width=900)",
        "c = interactive(scalar_global_heatmap, df='small', tt='weight', scalar_metric='rm2', width=900)\nviews = a, b, c"]
    nb = Notebook(lab(dpr), *cells)
    assert nb.run()
    p,canvases = Page(nb),nb.page.locator('.jupyter-matplotlib-canvas-div')
    until(canvases.count, 6) # the last expression `a` is displayed once
    for n in range(6): until(lambda n=n: canvases.nth(n).bounding_box()['width'] in (180, 720), True)

    # a line follows the pointer over the loss
    before = p.pixels(1)
    p.hover('a.cursor.loss', 7.2)
    p.prints('[l.get_xdata() for l in a.picture.lines], a.cursor.loss.cross[2].get_text()[:6]', '[[7, 7], [7, 7]] step=7')
    until(lambda: p.pixels(1)!=before, True)
    box = canvases.nth(0).bounding_box()
    nb.page.mouse.move(box['x']+5, box['y']-40)
    p.prints('[l.get_visible() for l in a.picture.lines]', '[False, False]')

    # Controls redraw the picture
    before = p.pixels(1)
    nb.out.get_by_label('tt').first.select_option('weights')
    nb.ask("""first = te.t.df.query("ttype=='weight' and path=='0'")['std'].iloc[0]""")
    p.prints('a.figure.get_suptitle(), a.figure.axes[0].lines[0].get_ydata()[0]==first', 'small · weights True')
    until(lambda: p.pixels(1)!=before, True)
    nb.out.get_by_label('scalar_metric').first.select_option(['mean', 'abs_max'])
    p.prints("a.controls['scalar_metric'].value, len(a.figure.legends)", "['mean', 'abs_max'] 1")
    nb.out.get_by_label('tt').first.select_option('each type')
    # The last picture stays, and a message is shown
    nb.out.get_by_text('Panels are drawn for layers or for tensor types').wait_for()
    p.prints('[ax.get_title("left") for ax in a.figure.axes]', "['0', '2']")
    nb.out.get_by_label('layer').first.fill('2')
    # Options: selected layers, matching layers, and an entry for all matches
    until(nb.out.locator('.widget-select-multiple select').nth(1).locator('option').count, 5)
    nb.out.locator('.widget-select-multiple select').nth(1).select_option('2')
    p.prints('a.message, sorted(ax.get_title("left") for ax in a.figure.axes)', "['output gradients', 'outputs', 'weights']")

    # a click goes to a step
    before = p.pixels(3)
    p.click('b.cursor.loss', 4.1)
    p.prints("b.controls['step'].value, b.figure.get_suptitle()", '4 small · outputs · 2 · step 4', of='b')
    until(lambda: p.pixels(3)!=before, True)
    nb.out.get_by_role('slider').first.press('ArrowRight')
    p.prints("b.controls['step'].value, b.cursor.loss.cross[2].get_text()[:6]", '5 step=5', of='b')

    # Open the histogram of a patch, and return to the heat map
    before = p.pixels(5)
    for back in 'right', 'Escape', 'Back':
        p.click('c.picture', 11, 2.5)
        p.prints("len(c.stack), c.figure.get_suptitle(), len(c.figure.axes[0].patches)>3", '2 small · weights · 2.weight · step 11 True', of='c')
        until(lambda: p.pixels(5)!=before, True)
        if back=='right': p.click('c.picture', 0, .1, button='right')
        elif back=='Escape': nb.page.keyboard.press('Escape')
        else: nb.out.get_by_role('button', name='Back').click()
        p.prints('len(c.stack), c.figure.get_suptitle()', '1 small · weights · root mean square', of='c')
    p.good()


@pytest.mark.release
@pytest.mark.slow
def test_images_have_the_same_controls(lab):
    "Without ipympl, pictures have the same controls, and also a slider over the steps and a button that opens a histogram"
    cells = ['%matplotlib inline', RUN, "a = interactive(scalar_line, df=te, layer='0', tt='Gradient', width=900)",
        "b = interactive(scalar_global_heatmap, df='small', tt='weight', width=900)\nviews = a, b\nb"]
    nb = Notebook(lab(1), *cells, fresh=False)
    assert nb.run()
    p,images = Page(nb),nb.out.locator('img.widget-image')
    until(images.count, 4)
    src = lambda n: images.nth(n).get_attribute('src')
    assert images.nth(1).bounding_box()['width']==720 and nb.page.locator('.jupyter-matplotlib').count()==0
    before = src(0), src(1)
    nb.out.get_by_role('slider').first.press('Home')
    p.prints('[l.get_xdata() for l in a.picture.lines]', '[[0, 0]]')
    until(lambda: src(0)!=before[0] and src(1)!=before[1], True)
    before = src(1)
    nb.out.get_by_label('kind').first.select_option('scatter')
    p.prints('len(a.figure.axes[0].collections)', '1')
    until(lambda: src(1)!=before, True)
    before = src(3)
    nb.out.get_by_label('tensor').fill('2.b')
    until(nb.out.locator('.widget-select select').last.locator('option').count, 3)
    nb.out.locator('.widget-select select').last.select_option('2.bias')
    nb.out.get_by_role('button', name='Show its histogram').click()
    p.prints('b.figure.get_suptitle()', 'small · weights · 2.bias · step 19', of='b')
    until(lambda: src(3)!=before, True)
    nb.out.get_by_role('button', name='Back').click()
    p.prints('b.figure.get_suptitle()', 'small · weights · standard deviation', of='b')
    p.good()


LLAMA = '''
import os, torch
from torch import nn
from torchember import TrainingStats, to_logframe, torchEmber
class Attention(nn.Module):
    def __init__(self): super().__init__(); self.wq,self.wk,self.wv,self.wo = (nn.Linear(8, 8) for _ in range(4))
    def forward(self, x): return self.wo(torch.softmax(self.wq(x)@self.wk(x).mT, -1)@self.wv(x))
class FeedForward(nn.Module):
    def __init__(self): super().__init__(); self.w1,self.w2,self.w3 = nn.Linear(8, 16),nn.Linear(16, 8),nn.Linear(8, 16)
    def forward(self, x): return self.w2(self.w1(x).relu()*self.w3(x))
class Block(nn.Module):
    def __init__(self): super().__init__(); self.attention,self.feed_forward = Attention(),FeedForward()
    def forward(self, x): return (x := x+self.attention(x))+self.feed_forward(x)
class Llama(nn.Module):
    def __init__(self): super().__init__(); self.layers,self.output = nn.ModuleDict({'3': Block(), '5': Block()}),nn.Linear(8, 5)
    def forward(self, x):
        for l in self.layers.values(): x = l(x)
        return self.output(x)
torch.manual_seed(0)
model = Llama()
opt,x,y,losses = torch.optim.Adam(model.parameters()),torch.randn(8, 4, 8),torch.randint(5, (32,)),[]
with torchEmber(model, optimizer=opt, stats='numerics', ttypes=('output', 'output_grad', 'optimizer'), name='llama') as te:
    for _ in range(101):
        losses.append(torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y))
        losses[-1].backward(); opt.step(); opt.zero_grad()
df = lf = to_logframe(te)
losses = [l.item() for l in losses]
tstats = TrainingStats([*range(101)], losses, [l+.1 for l in losses])
import torchember as viz
from torchember import exp_hist, interactive, scalar_global_heatmap, scalar_line
'''
# Calls from the README and the example notebook of Track & Visualize
THEIRS = ["interactive(exp_hist, df=lf, layer='output', tt='Activation', step=0, dtype_annotation='float8_e4m3fn')",
    "interactive(scalar_line, df=lf, layer='output', tt='Gradient', scalar_metric='std')",
    "interactive(scalar_global_heatmap, df=lf, tt='Optimiser_State.exp_avg', scalar_metric='rm2', inc=50)",
    """interactive(exp_hist, train_stats=tstats, df=lf, layer=[n for n in lf.metadata.name.unique().tolist() if 'layers.5.feed_forward.w' in n],
        tt='Activation', step=0, dtype_annotation='float8_e4m3fn', col_wrap=3)""",
    """interactive(scalar_line, train_stats=tstats, mouse_sensitivity=20000, df=lf,
        layer=[n for n in lf.metadata.name.unique().tolist() if 'layers.5.feed_forward.w' in n], tt='Gradient', scalar_metric=['std', 'rm2'], col_wrap=3)""",
    "viz.interactive(f=viz.scalar_line, df=df, tt='Activation', layer='output', col_wrap=3, scalar_metric=['rm2', 'min_abs'])",
    "viz.interactive(f=viz.scalar_global_heatmap, df=df, tt='Activation', col_wrap=3, scalar_metric='rm2', inc=50)",
    "viz.interactive(f=viz.exp_hist, df=df, layer='output', tt='Activation', step=100, col_wrap=3)",
    """interactive(scalar_line, train_stats=tstats, df=lf, layer=[n for n in lf.metadata.name.unique().tolist() if 'layers.3.attention.w' in n],
        tt='Gradient', scalar_metric=['std', 'rm2'], col_wrap=3)"""]


@pytest.mark.slow
# Rarely affected by changes: other tests check these calls, and a browser drives such pictures above
@pytest.mark.release
def test_calls_of_track_and_visualize_work(lab):
    calls = [f'v = {call}\nviews.append(v)' for call in THEIRS]
    nb = Notebook(lab(1), '%matplotlib widget', LLAMA, 'views = []', *calls, size=(1800, 1600), fresh=False)
    assert nb.run()
    p,canvases = Page(nb),nb.page.locator('.jupyter-matplotlib-canvas-div')
    p.prints('[v.message for v in views]', str(['']*9))
    p.prints('[len(v.figure.axes) for v in views]', '[1, 1, 2, 3, 3, 1, 2, 1, 4]')
    p.prints('[v.cursor is not None for v in views]', str([False]*3+[True]*2+[False]*3+[True]))
    until(canvases.count, 12)
    p.click('views[3].cursor.loss', 40.2)
    p.prints("views[3].controls['step'].value, views[3].figure.get_suptitle()", '40 outputs · step 40', of='views[3]')
    p.prints("views[3].cursor.loss.cross[2].get_text().count('_loss=')", '2')
    p.hover('views[4].cursor.loss', 60.2)
    p.prints('{float(x) for l in views[4].picture.lines for x in l.get_xdata()}', '{60.0}')
    p.click('views[2].picture', 50, 1.5)
    p.prints("'exp_avg · step 50' in views[2].figure.get_suptitle(), len(views[2].stack)", 'True 2', of='views[2]')
    p.good()


def picture(nb): return nb.page.evaluate("[...document.querySelectorAll('.jp-OutputArea img')].map(i => i.src)")


@pytest.mark.release
@pytest.mark.slow
def test_live_redraws_while_a_cell_trains(lab):
    "The live picture is redrawn while a cell trains, and the report contains its cost in time"
    cells = [program("import matplotlib.pyplot as plt; plt.style.use('dark_background'); other = plt.figure(); plt.close(other)"),
        "view = te.live(every=.5); train(600, lambda: os.path.exists('enough')); print('trained: 1')",
        """report = te.close(); print(f"report: {report['live']} {report['seconds']} {view.thread_seconds} {view.process_seconds} {sum(os.times()[2:4])}")"""]
    nb = Notebook(lab(1), *cells)
    nb.page.evaluate("jupyterapp.commands.execute('notebook:run-all-cells').then(v => window.ran = v) && 0")
    seen = []
    for _ in range(3): # Three redraws while the cell still runs
        nb.page.wait_for_function("seen => [...document.querySelectorAll('.jp-OutputArea img')].some(i => !seen.includes(i.src))", arg=seen)
        seen += picture(nb)
        assert len(picture(nb))==1
    assert nb.out.get_by_text('trained: 1').count()==0
    (nb.page.root/'enough').touch()
    nb.page.wait_for_function('window.ran')
    said,recording,own,process,children = nb.numbers('report')
    assert len(picture(nb))==1 and picture(nb)[0] not in seen[:1] and nb.bad==[]
    dark = nb.page.evaluate("""async () => { const i = document.querySelector('.jp-OutputArea img'); await i.decode()
        const c = new OffscreenCanvas(1, 1).getContext('2d'); c.drawImage(i, 0, 0); return [...c.getImageData(0, 0, 1, 1).data] }""")
    assert dark[:3]==[0, 0, 0] # The picture has the dark style of the user
    # os.times has a resolution of .01 s
    assert 0<said<recording and said==pytest.approx(own+process) and process==pytest.approx(children, abs=.05)
