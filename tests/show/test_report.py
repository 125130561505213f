"A report is opened from disk in a real browser: pointer, search, phone, dark mode, and attacks by names in the run"
import base64
import gzip
import re
from contextlib import contextmanager

import numpy as np
import pandas as pd
import pytest
import torch
from playwright.sync_api import expect
from torch import nn

import torchember.show.page.data as data
from torchember import diagnose, read, report, to_logframe, torchEmber
from torchember.frames.handle import Run
from torchember.show.page.data import pack_exponents, tensor_keys
from torchember.show.select import places

expect.set_options(timeout=30_000)

evil = '<img src=x onerror="window.hit=1">', "</script><script>window.hit=1</script>", '{data}', '<!--<script>', "');window.hit=1;('"


def train(model, name, steps=40, stats='numerics', nan_at=None, **kwargs):
    opt = torch.optim.SGD(model.parameters(), .05)
    te = torchEmber(model, optimizer=opt, name=name, stats=stats, **kwargs)
    for i in range(steps):
        x = torch.randn(16, 8)
        if i==nan_at: x[0, 0] = torch.nan
        loss = model(x).pow(2).mean()
        te.log(loss=loss, rate=.05)
        opt.zero_grad()
        loss.backward()
        opt.step()
    te.close()
    return te


def net(): return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Sequential(nn.Linear(16, 16), nn.Tanh()), nn.Linear(16, 4))


@contextmanager
def opened(chromium, file, address='', **context):
    "Open a page, and wait until it is drawn. `page.asked` lists its requests, `page.wrong` lists its errors"
    with chromium().new_context(**{'viewport': {'width': 1300, 'height': 900}, **context}) as context:
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.asked,page.wrong = [],[]
        context.on('request', lambda r: page.asked.append(r.url))
        page.on('pageerror', lambda e: page.wrong.append(str(e)))
        page.on('console', lambda m: m.type=='error' and page.wrong.append(m.text))
        page.goto(file.resolve().as_uri()+address)
        page.wait_for_selector('html[data-ready]')
        yield page


def drawn(page): page.evaluate('() => drawing') # wait until the drawing is on the screen


def cells(page): return [r.locator('th, td').all_inner_texts() for r in page.locator('#layers tbody tr').all()]


def ink(page, chart): # Number of pixels that are drawn in a chart
    return page.locator(f'#{chart} canvas').evaluate('c => c.toDataURL()')


def at_row(page, label):
    "Return the vertical position of a tensor in the heat map, in pixels from the top"
    k = page.evaluate('kind().tensors.map(t => t.label)')
    return (k.index(label)+.5)/len(k)*page.locator('#heat .u-over').bounding_box()['height']


def test_a_page_needs_no_network_and_describes_the_run(chromium, tmp_path):
    te = train(net(), 'calm')
    file = report(te, tmp_path/'calm.html')
    with opened(chromium, file) as page:
        assert [u for u in page.asked if not u.startswith('data:')]==[file.as_uri()] and not page.wrong
        expect(page.locator('h1')).to_have_text('calm')
        for fact in ('Sequential', '40 steps, 0 to 39', 'recording took', f'{len(te.t.df):,} rows'): expect(page.locator('#facts')).to_contain_text(fact)
        expect(page.locator('#trouble')).to_have_text('All tensors that were recorded are finite.')
        assert page.title()=='calm · torchember'
    text = file.read_text('utf-8')
    file.write_text(re.sub('<meta http-equiv[^>]*>', '', text).replace('<body>', '<body><img src="http://127.0.0.1:9/x">'), 'utf-8')
    with opened(chromium, file) as page: assert 'http://127.0.0.1:9/x' in page.asked # This test must notice a request


def test_the_table_is_that_of_the_log(chromium, tmp_path):
    te = train(net(), 'table')
    df = te.t.df
    with opened(chromium, report(te, tmp_path/'a.html')) as page:
        for kind in ('output', 'weight_grad'):
            page.locator('#kind').select_option(kind)
            page.locator('#stat').select_option('rms')
            drawn(page)
            got = {r[0]: r[1:] for r in cells(page)}
            of = df[df.ttype==kind]
            of = of.assign(name=of.path.astype(str)+('.'+of.pname.astype(str) if kind=='weight_grad' else ''))
            assert set(got)=={n or 'Sequential' for n in of.name}
            for name,line in got.items():
                y = of[of.name==('' if name=='Sequential' else name)].sort_values('step')['rms']
                assert [int(line[0]), int(line[-1])]==[40, 0]
                np.testing.assert_allclose([float(v) for v in line[1:5]], [y.iloc[0], y.iloc[-1], y.min(), y.max()], rtol=1e-3)
        expect(page.locator('#numbers .readout')).to_contain_text(f"lowest {df.loss.min():.3}"[:11])
        page.locator('#layers thead button', has_text='highest').click()
        drawn(page)
        highest = [float(r[5]) for r in cells(page)]
        assert highest==sorted(highest, reverse=True) and page.locator('#layers th[aria-sort=descending]').count()==1


def test_a_click_opens_the_sizes_of_a_layer_and_changes_the_address(chromium, tmp_path):
    te = train(net(), 'click')
    df = te.t.df
    file = report(te, tmp_path/'a.html')
    with opened(chromium, file) as page:
        before = ink(page, 'lines'),ink(page, 'sizes')
        width = page.locator('#heat .u-over').bounding_box()['width']
        page.locator('#heat .u-over').hover(position={'x': width*.25, 'y': at_row(page, '2.1')})
        expect(page.locator('#heat .readout')).to_contain_text(re.compile('^2.1, step (9|10)'))
        page.locator('#heat .u-over').click(position={'x': width*.25, 'y': at_row(page, '2.1')})
        drawn(page)
        step = int(page.locator('#stepout').inner_text())
        assert abs(step-39*.25)<1.5
        near = int(re.search(r'step (\d+)$', page.locator('#sizes h2').inner_text())[1])
        assert 'Sizes of the numbers in 2.1, outputs' in page.locator('#sizes h2').inner_text() and abs(near-step)<=1
        assert ink(page, 'lines')!=before[0] and ink(page, 'sizes')!=before[1]
        row = df[(df.path=='2.1')&(df.ttype=='output')&(df.step==near)].iloc[0]
        expect(page.locator('#sizes .readout')).to_contain_text(f'{sum(row.exponents):,} numbers')
        counts,low = np.array(row.exponents[1:-1]),int(row.exponent_min) # The bars show the counts of the log
        shares = page.evaluate('[charts.sizes.data[0], charts.sizes.data[1]]')
        for e,share in zip(*shares, strict=True):
            if low<=e<low+len(counts): assert share==pytest.approx(counts[e-low]/sum(row.exponents), rel=1e-3)
        expect(page.locator('#layers tr[aria-selected=true]')).to_have_count(1)
        expect(page.locator('[role=treeitem][aria-selected=true]')).to_have_attribute('title', '2.1 (Tanh)')
        address = page.evaluate('location.hash')
        page.keyboard.press('Escape')
        drawn(page)
        expect(page.locator('#layers tr[aria-selected=true]')).to_have_count(0)
        assert not page.wrong
    with opened(chromium, file, address) as page:
        expect(page.locator('#stepout')).to_have_text(str(step))
        expect(page.locator('#sizes h2')).to_contain_text('2.1')


def test_attention_has_a_map_of_layers_and_heads(chromium, tmp_path):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a,self.b = nn.MultiheadAttention(8, 2),nn.MultiheadAttention(8, 4)
        def forward(self, x): return self.b(y := self.b(*[self.a(x, x, x)[0]]*3)[0], y, y)[0]
    te = train(Twice(), 'heads', steps=3, attention=True)
    with opened(chromium, report(te, tmp_path/'a.html'), '#tensors=attention&stat=entropy&step=2') as page:
        expect(page.locator('#heads h2')).to_have_text('Entropy (1: equal weights) of each head, step 2')
        assert page.locator('.heads th').all_inner_texts()==['a', 'b (0)', 'b (1)', 'head']
        cell = page.locator('.heads tbody tr').nth(2).locator('td').nth(3)
        want = read(te, 'b', 'attention', steps=2).query("call==1 and tname=='head_3'").entropy.item()
        name,value = cell.get_attribute('title').rsplit(': ', 1)
        assert 'head_3' in name and abs(float(value)-want)<1e-3
        colors = [[c.evaluate('e => e.style.background') for c in r.locator('td').all()] for r in page.locator('.heads tbody tr').all()]
        assert [sum(c.startswith('rgb') for c in r) for r in colors]==[2, 4, 4]
        cell.click()
        drawn(page)
        assert page.evaluate('state.label')==name and page.locator('#sizes').is_hidden() and not page.wrong
        page.locator('#kind').select_option('output')
        drawn(page)
        assert page.locator('#heads').is_hidden() and page.locator('#sizes').is_visible()


@pytest.mark.release
def test_search_narrows_the_table_and_the_tree(chromium, tmp_path):
    train(net(), 'search')
    with opened(chromium, report('search', tmp_path/'a.html')) as page:
        n = page.locator('[role=treeitem]').count()
        page.keyboard.press('/')
        page.keyboard.type('2.')
        expect(page.locator('#layers tbody tr')).to_have_count(2)
        assert [r[0] for r in cells(page)]==['2.0', '2.1']
        assert page.locator('[role=treeitem]').count()<n
        page.keyboard.press('Control+A')
        page.keyboard.type('nothing like it')
        expect(page.locator('#layers .readout')).to_contain_text('No layer has')
        page.keyboard.press('Escape')
        expect(page.locator('#layers tbody tr')).to_have_count(7)
        expect(page.locator('[role=treeitem]')).to_have_count(n)


@pytest.mark.slow
def test_search_narrows_the_heat_map_and_the_lines(chromium, tmp_path):
    te = train(net(), 'charts')
    rows = lambda page: page.evaluate("charts.heat.axes[1]._values") # Return the names beside the heat map
    with opened(chromium, report(te, tmp_path/'a.html')) as page:
        every = rows(page)
        assert every==['0', '1', '2.0', '2.1', '2', '3', 'Sequential'] and page.evaluate('charts.lines.series.length')==8
        page.fill('#search', '2.')
        drawn(page)
        assert rows(page)==['2.0', '2.1'] and page.evaluate('charts.lines.series.length')==3
        y = page.evaluate("charts.lines.data[2]")
        assert len(y)==40 and y==page.evaluate("Promise.all([view()]).then(([v]) => Array.from(v.value.slice(3 * v.columns, 4 * v.columns), Number))")
        expect(page.locator('#lines .readout')).to_contain_text('2 tensors of 7')
        box = page.locator('#heat .u-over').bounding_box()
        page.mouse.click(box['x']+box['width']/2, box['y']+box['height']*.75) # the lower of the two remaining rows
        drawn(page)
        assert page.evaluate('state.label')=='2.1'
        page.keyboard.press('Escape') # Escape clears the selection
        page.fill('#search', 'nowhere')
        drawn(page)
        expect(page.locator('#heat')).to_be_hidden()
        expect(page.locator('#lines')).to_be_hidden()
        page.fill('#search', '')
        page.evaluate('() => choose({})')
        drawn(page)
        assert rows(page)==every and page.evaluate('charts.lines.series.length')==8 and not page.wrong


def test_parameters_without_training_have_a_reason(chromium, tmp_path):
    model = net()
    model[0].requires_grad_(False)
    te = train(model, 'frozen')
    with opened(chromium, report(te, tmp_path/'a.html'), '#tensors=weight_grad') as page:
        expect(page.locator('#missing')).to_have_text('Not trained: frozen: 0.')
        assert [c[:2] for c in cells(page)][:3]==[['0.weight frozen', '0'], ['0.bias frozen', '0'], ['2.0.weight', '40']]
        assert page.evaluate("reasonsIn(kind().tensors.map(t => t.why), i => kind().n[state.stat][i] > 0)")==[['frozen', 0, 2, False]]
        # The histogram begins with the first tensor that has data
        expect(page.locator('#sizes h2')).to_contain_text('2.0.weight')
        page.evaluate("choose({ label: '0.weight' })")
        drawn(page)
        expect(page.locator('#heat .readout')).to_have_text('0.weight, step 39: frozen')
        page.fill('#search', 'frozen') # The search also finds tensors by the reason for missing values
        drawn(page)
        assert page.evaluate("charts.heat.axes[1]._values")==['0.weight', '0.bias'] and not page.wrong


def test_a_step_without_neighbors_is_a_mark(chromium, tmp_path):
    steps = [0, 1, 36, 72]
    df = pd.DataFrame([{'path': p, 'ttype': 'output', 'tname': 'output_0', 'step': s, 'call': 0, 'std': 1.+s} for s in steps for p in 'ab'])
    with opened(chromium, report(df, tmp_path/'a.html')) as page:
        assert page.evaluate('columnEnds(kind())')==[[-.5, .5], [.5, 1.5], [35.5, 36.5], [71.5, 72.5]]
        assert page.evaluate('columnEnds({ step: [0, 10, 20, 30] })')==[[-5, 5], [5, 15], [15, 25], [25, 35]]
        assert page.evaluate('columnEnds({ step: [0, 1, 36, 72], thin: true })')[2]==[18.5, 54] # a column of many steps
        assert page.evaluate('columnEnds({ step: [7] })')==[[6.5, 7.5]] and not page.wrong


def test_one_bar_of_all_numbers_becomes_a_sentence(chromium, tmp_path):
    rows = [{'path': p, 'ttype': 'output', 'tname': 'output_0', 'step': 0, 'call': 0, 'std': 1., 'exponent_min': -2, 'exponents': e}
        for p,e in (('low', [5, 0, 0, 0]), ('high', [0, 0, 0, 7]), ('some', [1, 2, 0, 3]))]
    with opened(chromium, report(pd.DataFrame(rows), tmp_path/'a.html')) as page:
        for label,text in (('low', 'All 5 numbers are smaller than 2⁻², or zero'), ('high', 'All 7 numbers are 2⁰ or larger'), ('some', '6 numbers')):
            page.evaluate(f"choose({{ label: '{label}' }})")
            drawn(page)
            expect(page.locator('#sizes .readout')).to_contain_text(text)
            assert page.locator('#sizes canvas').count()==(label=='some')


@pytest.mark.slow
def test_all_actions_work_by_keyboard(chromium, tmp_path):
    train(net(), 'keys')
    with opened(chromium, report('keys', tmp_path/'a.html')) as page:
        for _ in range(12):
            page.keyboard.press('Tab')
            if page.evaluate("document.activeElement.getAttribute('role')")=='treeitem': break
        assert page.evaluate("document.activeElement.getAttribute('role')")=='treeitem'
        page.keyboard.press('ArrowDown')
        page.keyboard.press('ArrowDown')
        page.keyboard.press('ArrowDown')
        page.keyboard.press('Enter')
        drawn(page)
        expect(page.locator('[role=treeitem][aria-selected=true]')).to_have_attribute('title', '2 (Sequential)')
        # The selected module and the modules inside it
        expect(page.locator('#layers tr[aria-selected=true]')).to_have_count(3)
        page.keyboard.press('ArrowLeft')
        expect(page.locator('[role=treeitem][aria-expanded=false]')).to_have_count(1)
        page.locator('#heat .chart').focus()
        page.keyboard.press('ArrowLeft')
        page.keyboard.press('ArrowLeft')
        page.keyboard.press('ArrowDown')
        drawn(page)
        expect(page.locator('#stepout')).to_have_text('37')
        page.locator('#step').focus()
        page.keyboard.press('Home')
        expect(page.locator('#stepout')).to_have_text('0')
        drawn(page)
        expect(page.locator('#sizes h2')).to_contain_text('step 0')


def test_a_click_opens_the_first_non_finite_tensor(chromium, tmp_path):
    train(net(), 'sick', nan_at=20)
    with opened(chromium, report('sick', tmp_path/'a.html')) as page:
        expect(page.locator('#trouble')).to_have_text('First not finite: step 20, input of the model (1 NaN)')
        expect(page.locator('#numbers .readout')).to_contain_text('not finite 20 times')
        page.locator('#trouble button').click()
        drawn(page)
        expect(page.locator('#kind')).to_have_value('input')
        expect(page.locator('#stepout')).to_have_text('20')
        red = page.evaluate("""() => { const c = document.querySelector('#heat canvas'), d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data
            let n = 0; for (let i = 0; i < d.length; i += 4) n += d[i] > 180 && d[i + 1] < 40 && d[i + 2] < 50; return n / (d.length / 4) }""")
        assert .15<red<.6 # Only the second half of the steps is red
        assert not page.wrong


def said(*found, **more):
    "Return findings in the form of the data of a page"
    one = dict(severity='error', rule='mine', text='What is wrong.', first=0, last=0, below=[])
    return dict(findings=[{**one, **f} for f in found], more=0, looked='2 rules looked', unseen=[], failed=[], **more)


def with_health(monkeypatch, health): monkeypatch.setattr('torchember.show.page.data.check_health', lambda run, table=None, rows=None: health)


def test_findings_are_on_top_and_open_by_click(chromium, tmp_path):
    train(net(), 'sick', nan_at=20)
    with opened(chromium, report('sick', tmp_path/'a.html')) as page:
        health = page.locator('#health')
        expect(health.locator('h2')).to_contain_text('What is wrong: 1 error')
        first = health.locator('li').first
        expect(first).to_have_class('error')
        expect(first).to_contain_text(re.compile('^error The input of .* at step 20.*Try: .*Look at: overview'))
        expect(health).to_contain_text('rules checked 40 steps')
        first.locator('> button').click()
        drawn(page)
        expect(page.locator('#kind')).to_have_value('input')
        expect(page.locator('#stepout')).to_have_text('20')
        assert page.evaluate('[state.label, state.path]')==[None, None] and not page.wrong
        page.locator('#heat').wait_for(state='visible')


def test_a_finding_opens_its_tensor_by_click_and_by_keyboard(chromium, tmp_path, monkeypatch):
    below = [dict(severity='warning', rule='later', text='That follows.', path='2.1', ttype='output', first=12, last=30)]
    odd = dict(text='`3.weight` is `odd', path='3', ttype='weight_grad', pname='weight', first=7, last=9, below=below, more=4,
        advice='Divide `lr`.', look='updates(run)')
    with_health(monkeypatch, said(odd, dict(path='2', ttype='buffer', first=999, severity='warning'), dict(ttype='scalar', first=3, severity='warning'),
        dict(text='The fourth.'), dict(severity='info', text='Aside.', path='0', ttype='output', first=2)))
    train(net(), 'led')
    with opened(chromium, report('led', tmp_path/'a.html')) as page:
        at = lambda: page.evaluate('[state.kind, state.label, state.path, state.step]')
        health = page.locator('#health')
        expect(health.locator('h2')).to_have_text('What is wrong: 2 errors, 2 warnings')
        assert health.locator('> ul > li').count()==3 and health.locator('> details > summary').all_inner_texts()==['and 1 more', '1 note']
        one = health.locator('> ul > li').first
        assert one.locator('> button code').all_inner_texts()==['3.weight'] and one.locator('> button').inner_text()=='error 3.weight is `odd'
        expect(one.locator('> p')).to_have_text('Try: Divide lr. Look at: updates(run)')
        page.fill('#search', 'nothing')
        one.locator('> button').click()
        drawn(page)
        assert at()==['weight_grad', '3.weight', '3', 7] and page.evaluate('state.words')==''
        expect(page.locator('#layers tr[aria-selected=true] button')).to_have_text('3.weight')
        expect(page.locator('[role=treeitem][aria-selected=true]')).to_have_attribute('title', '3 (Linear)')
        expect(page.locator('#heat h2')).to_be_in_viewport()
        expect(one.locator('summary')).to_have_text('5 more findings follow from it')
        expect(one.locator('li')).to_be_hidden() # These findings are folded
        one.locator('> button').focus()
        page.keyboard.press('Tab')
        page.keyboard.press('Enter')
        expect(one.locator('li')).to_be_visible()
        page.keyboard.press('Tab')
        page.keyboard.press('Enter')
        drawn(page)
        assert at()==['output', '2.1', '2.1', 12]
        address = page.evaluate('location.hash')
        # This quantity is not recorded, so the page goes to its module at the nearest step
        health.locator('> ul > li').nth(1).locator('button').click()
        drawn(page)
        assert at()==['output', None, '2', 39]
        health.locator('> ul > li').nth(2).locator('button').click() # This finding is about the loss
        drawn(page)
        assert at()==['output', None, None, 3]
        expect(page.locator('#numbers')).to_be_in_viewport()
        assert not page.wrong
    with opened(chromium, tmp_path/'a.html', address) as page: assert page.evaluate('[state.kind, state.label, state.step]')==['output', '2.1', 12]


def test_a_healthy_run_lists_what_was_not_checked(chromium, tmp_path):
    torch.manual_seed(1)
    model,w = nn.Linear(8, 2),torch.randn(8, 2)
    opt = torch.optim.SGD(model.parameters(), .05)
    te = torchEmber(model, optimizer=opt, name='well')
    for _ in range(60):
        x = torch.randn(64, 8)
        loss = (model(x)-x@w).pow(2).mean()
        te.log(loss=loss)
        opt.zero_grad()
        loss.backward()
        opt.step()
    te.close()
    with opened(chromium, report(te, tmp_path/'a.html')) as page:
        assert page.locator('#health > p').count()==1 and page.locator('#health h2').count()==0
        looked,unseen = r"\d+ rules checked 60 steps .* and 'loss'\.",r"Not checked: the fraction of dead units \(to record: stats='full'\)\."
        expect(page.locator('#health > p')).to_have_text(re.compile(f"^No problem found\\. {looked} {unseen}$"))


def test_a_failing_rule_does_not_prevent_the_report(chromium, tmp_path, monkeypatch):
    te = train(net(), 'failing', 6)
    def broken(run, df=None): raise RuntimeError('<b>no</b>')
    monkeypatch.setattr('torchember.show.page.data.load_history', broken)
    with opened(chromium, report(te, tmp_path/'a.html')) as page:
        expect(page.locator('#health')).to_have_text('The rules could not check this run: RuntimeError: <b>no</b>')
        assert page.locator('#layers tbody tr').count() and not page.wrong


@pytest.mark.parametrize('scheme', ['light', 'dark'])
def test_findings_are_readable_text(chromium, tmp_path, monkeypatch, scheme):
    "Findings with any text are readable on a phone, with enough contrast"
    words = dict(text=f'{evil[0]} `{evil[1]}` {evil[4]}', rule=evil[0], path=evil[1], ttype=evil[0], pname=evil[4], advice=f'`{evil[0]}`', look=evil[1])
    more = dict(words, severity='warning', below=[dict(words, severity=evil[0], first=0, last=0)])
    found = said(words, more, dict(words, severity='info'), dict(words, severity='"><script>', first=1, last=2))
    with_health(monkeypatch, {**found, 'looked': evil[1], 'failed': [evil[0]], 'more': 3})
    train(net(), 'evil', 6)
    with opened(chromium, report('evil', tmp_path/'a.html'), viewport={'width': 390, 'height': 800}, color_scheme=scheme) as page:
        for d in page.locator('#health details').all(): d.evaluate('d => { d.open = true }')
        for b in page.locator('#health li button').all():
            b.click()
            drawn(page)
        assert page.locator('#health li').count()==5
        assert page.evaluate('window.hit') is None and page.locator('#health img, #health script').count()==0 and not page.wrong
        assert page.evaluate('document.querySelectorAll("script").length')==3
        for text in (evil[0], evil[1], evil[4]): expect(page.locator('#health li').first).to_contain_text(text)
        assert page.evaluate('document.documentElement.scrollWidth<=innerWidth')
        colors = page.evaluate("""[...document.querySelectorAll('#health li > button b, #health p')].map(e => getComputedStyle(e).color)""")
        back = luminance(page.evaluate('getComputedStyle(document.documentElement).backgroundColor'))
        for c in colors: assert (max(luminance(c), back)+.05)/(min(luminance(c), back)+.05)>4.5


def luminance(css): # Relative luminance as defined by WCAG
    return sum(w*(v/12.92 if (v := int(c)/255)<=.04045 else ((v+.055)/1.055)**2.4) for w,c in zip((.2126, .7152, .0722), re.findall(r'\d+', css), strict=False))


@pytest.mark.slow
@pytest.mark.parametrize('size', [(390, 800), (1300, 900)], ids=['phone', 'desk'])
@pytest.mark.parametrize('scheme', ['light', 'dark'])
def test_a_page_fits_phone_and_desktop_in_light_and_dark(chromium, tmp_path, size, scheme):
    train(net(), 'seen', steps=12)
    phone = size[0]<700
    with opened(chromium, report('seen', tmp_path/'a.html'), viewport=dict(zip(('width', 'height'), size, strict=True)), color_scheme=scheme, is_mobile=phone,
                has_touch=phone, device_scale_factor=2 if phone else 1) as page:
        light = lambda css: sum(map(int, re.findall(r'\d+', css)[:3]))/765
        colors = page.evaluate('[getComputedStyle(document.documentElement).backgroundColor, getComputedStyle(document.documentElement).color]')
        assert (light(colors[0])>.5)==(scheme=='light') and abs(light(colors[0])-light(colors[1]))>.6
        # The page needs no horizontal scrolling
        assert page.evaluate('document.documentElement.scrollWidth<=innerWidth')
        small = page.evaluate("[...document.querySelectorAll('p, td, select, label, h2')].filter(e => parseFloat(getComputedStyle(e).fontSize)<12).length")
        assert small==0
        before = ink(page, 'heat')
        page.locator('#heat .u-over').scroll_into_view_if_needed()
        (page.locator('#heat .u-over').tap if phone else page.locator('#heat .u-over').click)(position={'x': 30, 'y': at_row(page, '2')})
        drawn(page)
        expect(page.locator('#sizes h2')).to_contain_text('numbers in 2, outputs')
        page.locator('#theme').click()
        drawn(page)
        assert ink(page, 'heat')!=before
        assert (light(page.evaluate('getComputedStyle(document.documentElement).backgroundColor'))>.5)==(scheme=='dark')
        assert not page.wrong


@pytest.mark.slow
def test_hostile_names_are_shown_as_text(chromium, tmp_path):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.ModuleDict({n: type(n, (nn.Linear,), {})(8, 8) for n in evil if '.' not in n})
            self.dots = type(evil[0], (nn.Linear,), {})(8, 8)

        def forward(self, x):
            for m in self.inner.values(): x = m(x)
            return self.dots(x)
    model = Odd()
    Odd.__name__ = Odd.__qualname__ = evil[1]
    te = torchEmber(model, name='evil')
    for _ in range(3):
        te.log(**{evil[0]: 1., evil[1]: 2.})
        model(torch.randn(4, 8)).sum().backward()
        te.probe(evil[1], torch.ones(3))
        te.step()
    te.close()
    df = te.t.df
    df['run'] = pd.Categorical([evil[1]]*len(df))
    for i,source in enumerate((te, df)):
        file = report(source, tmp_path/f'{i}.html')
        with opened(chromium, file) as page:
            page.locator('#layers tbody tr').first.click()
            page.keyboard.press('/')
            page.keyboard.type(evil[0])
            drawn(page)
            for o in page.locator('#kind option').all():
                page.locator('#kind').select_option(o.get_attribute('value'))
                drawn(page)
            assert page.evaluate('window.hit')is None and page.locator('img').count()==0 and not page.wrong
            assert page.evaluate('document.querySelectorAll("script").length')==3
            page.locator('#search').fill('')
            assert (evil[0] if i==0 else '{data}') in page.locator('#tree').inner_text() # a table has no classes
            assert page.locator('#number option').all_inner_texts()==[*evil[:2], 'grad_norm']
            assert (page.locator('h1').inner_text()==evil[1])==(i==1)
        # If a name were inserted as HTML, the content policy of the page would still prevent its scripts
        text = file.read_text('utf-8')
        assert "script-src 'sha256-" in text and "unsafe" not in text.split('<body>')[0]
        file.write_text(text.replace('<body>', '<body><img src="data:," onerror="window.hit=1"><script>window.hit=1</script>'), 'utf-8')
        with opened(chromium, file) as page: assert page.evaluate('window.hit')is None
        file.write_text(re.sub('<meta http-equiv[^>]*>', '', file.read_text('utf-8')), 'utf-8')
        # Without both protections, the script runs: so this test would notice it
        with opened(chromium, file) as page: assert page.evaluate('window.hit')==1


def sources():
    yield 'one step', lambda: train(net(), 'a', 1)
    yield 'one layer', lambda: train(nn.Linear(8, 2), 'a', 3)
    yield 'all NaN', lambda: train(net(), 'a', 5, nan_at=0)
    yield 'a table', lambda: train(net(), 'a', 5, 'basic').t.df
    yield 'a logframe', lambda: to_logframe(train(net(), 'a', 5))
    yield 'weights only', lambda: read(train(net(), 'a', 5), ttype='weight')
    yield 'numbers only', lambda: read(train(net(), 'a', 5), ttype='scalar')
    yield 'a constant', lambda: train(nn.Sequential(nn.Linear(8, 4), nn.Threshold(1e9, 0.)), 'a', 4)
    yield 'every third step', lambda: train(net(), 'a', 30, every=3)
    yield 'gradients that vanish', lambda: train(nn.Sequential(*[nn.Linear(8, 8) for _ in range(120)]), 'a', 3)
    yield 'numbers of all sizes', lambda: sized(train(net(), 'a', 4, 'basic').t.df)
    yield 'text and flags', lambda: flags()
    yield 'still going on', lambda: unfinished()


def sized(df): # from the smallest float32 to the largest, and larger doubles
    for c in ('std', 'max'): df[c] = np.geomspace(1e-320 if c=='max' else 1e-45, 1e300 if c=='max' else 3e38, len(df))
    df.loc[df.index[::7], 'std'] = 0.
    return df


def flags():
    model = net()
    te = torchEmber(model, name='flags', stats=lambda t: {'flag': bool((t.sum()>0).item()), 'txt': 'x'})
    for _ in range(3):
        model(torch.randn(4, 8)).sum().backward()
        te.log(loss=1.)
        te.step()
    te.close()
    return te


def unfinished():
    model = net()
    te = torchEmber(model, name='open')
    for _ in range(3):
        model(torch.randn(4, 8)).sum().backward()
        te.step()
    return te


@pytest.mark.slow
@pytest.mark.parametrize('what,source', [pytest.param(w, s, id=w) for w,s in sources()])
def test_a_page_accepts_odd_tables(chromium, tmp_path, what, source):
    with opened(chromium, report(source(), tmp_path/'a.html')) as page:
        for o in page.locator('#kind option').all():
            if page.locator('#kind').is_enabled(): page.locator('#kind').select_option(o.get_attribute('value'))
            drawn(page)
            for row in page.locator('#layers tbody tr').all()[:2]:
                row.click()
                drawn(page)
        assert not page.wrong and 'fault' not in page.locator('#small').inner_text()
        if what=='all NaN': expect(page.locator('#trouble')).to_contain_text('First not finite: step 0')
        if what=='still going on': expect(page.locator('#facts')).to_contain_text('still going on')


@pytest.mark.parametrize('ttype', [None, 'weight_grad'])
def test_rules_check_the_whole_run_with_one_read(monkeypatch, ttype):
    "A page reads the log once, and a page of some rows reads it twice. The page shows the findings of `diagnose`"
    te = train(net(), 'whole', nan_at=20)
    times,once = [],Run.table
    with monkeypatch.context() as m:
        m.setattr(Run, 'table', lambda run, *args, **kwargs: (run.given is None and times.append(args)) or once(run, *args, **kwargs))
        page = data.page_of('whole', ttype=ttype)
    assert len(times)==1+(ttype is not None)
    said = diagnose('whole')
    assert page['health']['looked']==' '.join(said.looked.split()) and page['health']['findings'][0]['text']==said.text[0]
    assert [k['ttype'] for k in page['kinds']]==([ttype] if ttype else list(te.t.df['ttype'].drop_duplicates()[lambda t: t!='scalar']))
    for k in page['kinds']:
        rows = read('whole', ttype=k['ttype'])
        rows = rows[rows['step'].isin(k['exponents']['step'])]
        assert unpacked(k['exponents']['counts'], (len(k['tensors']), -1)).sum(1).tolist()==[
            sum(map(sum, r['exponents'].dropna())) for _,r in rows.groupby(['path', 'tname'], sort=False)]


def unpacked(c, shape=None):
    raw = np.frombuffer(gzip.decompress(base64.b64decode(c['zip'])), 'u1').reshape(4, -1).T.copy().view('<f4')
    return np.nan_to_num(raw.reshape(shape or c['shape']))


def test_exponents_of_micro_batches_are_added():
    "Exponent counts of micro-batches are added per layer and step, also if rows of other layers lie between"
    counts = [[1, 2, 3, 4], [9, 9, 9, 9], [0, 5, 0, 1], [1, 0, 0, 0]]
    where = dict(path=['a', 'b', 'a', 'a'], ttype='output', tname='output_0', step=[0, 0, 0, 1], micro=[0, 0, 1, 0])
    rows = pd.DataFrame({**where, 'exponents': counts, 'exponent_min': -1})
    c = pack_exponents(rows, dict(enumerate(tensor_keys(rows, places(rows)[0]))), 2)['counts']
    assert unpacked(c).tolist()==[[[1, 7, 3, 5], [1, 0, 0, 0]], [[9, 9, 9, 9], [0, 0, 0, 0]]]


def test_a_report_without_data_is_an_error(tmp_path):
    te = train(net(), 'b', 2)
    with pytest.raises(FileNotFoundError, match='The folder .*missing.* does not exist'): report(te, tmp_path/'missing'/'a.html')
    with pytest.raises(ValueError, match='no rows'): report(te.t.df[:0], tmp_path/'a.html')
    with pytest.raises(FileNotFoundError, match="No run 'nobody'"): report('nobody', tmp_path/'a.html')
    assert not list(tmp_path.iterdir())
    assert report('b', tmp_path)==tmp_path/'b.html'


@pytest.mark.release
@pytest.mark.slow
def test_fast_clicks_break_nothing(chromium, tmp_path):
    train(net(), 'quick', ttypes=('input', 'output', 'weight', 'weight_grad', 'update', 'optimizer'))
    with opened(chromium, report('quick', tmp_path/'a.html')) as page:
        small = page.locator('#small').inner_text()
        for _ in range(3):
            page.locator('#kind').focus()
            for key in ('ArrowUp', 'ArrowUp', 'ArrowDown', 'ArrowDown', 'ArrowDown', 'ArrowDown'): page.keyboard.press(key)
            page.locator('#layers tbody tr').last.click()
            page.evaluate("""() => { for (const k of kinds.keys()) { const s = document.getElementById('kind'); s.value = k; s.onchange({ target: s })
                choose({ label: kind().tensors[0].label }) } }""")
        drawn(page)
        assert not page.wrong and page.locator('#small').inner_text()==small


@pytest.mark.release
@pytest.mark.slow
def test_zooming_selects_nothing(chromium, tmp_path):
    # Tensors are recorded every 4 steps, so their last step is before that of the loss
    train(net(), 'zoom', steps=39, every=4)
    with opened(chromium, report('zoom', tmp_path/'a.html')) as page:
        scales = 'Object.fromEntries(Object.entries(charts).filter(([n]) => n!="sizes").map(([n, u]) => [n, [u.scales.x.min, u.scales.x.max]]))'
        full = page.evaluate(scales)
        assert len(full)==3 and len({tuple(v) for v in full.values()})==1
        page.locator('#lines').scroll_into_view_if_needed()
        box = page.locator('#lines .u-over').bounding_box()
        page.mouse.move(box['x']+100, box['y']+50)
        page.mouse.down()
        page.mouse.move(box['x']+300, box['y']+60, steps=5)
        page.mouse.up()
        drawn(page)
        near = page.evaluate(scales)
        assert near['heat']==near['lines']==near['numbers'] and near['lines'][1]-near['lines'][0]<20
        before = page.evaluate('location.hash')
        page.locator('#lines .u-over').dblclick(position={'x': 60, 'y': 40})
        drawn(page)
        assert page.evaluate(scales)==full and page.evaluate('location.hash')==before and not page.wrong
        page.keyboard.press('Tab')
        page.locator('.skip').focus()
        page.keyboard.press('Enter')
        assert page.evaluate('location.hash')==before and page.evaluate('document.activeElement.id')=='main'


def test_a_non_finite_loss_is_shown_beside_tensors(chromium, tmp_path):
    model = net()
    te = torchEmber(model, name='loss')
    for i in range(6):
        model(torch.randn(4, 8)).sum().backward()
        te.log(loss=float('nan') if i>3 else 1., rate=.1)
        te.mark(epoch=i//2)
        te.step()
    te.close()
    with opened(chromium, report(te, tmp_path/'a.html')) as page:
        expect(page.locator('#trouble')).to_have_text('All tensors were finite, but not loss: first at step 4.')
        assert page.locator('#number option').all_inner_texts()==['loss', 'rate', 'grad_norm'] # marks are not in this list


@pytest.mark.slow
def test_a_module_that_is_sometimes_called_twice_has_sizes(chromium, tmp_path):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a,self.k = nn.Linear(8, 8),0

        def forward(self, x):
            self.k += 1
            return self.a(self.a(x)) if self.k==30 else self.a(x)
    te = train(Twice(), 'twice', 60)
    with opened(chromium, report(te, tmp_path/'a.html'), '#tensors=output&at=a+call+0') as page:
        expect(page.locator('#sizes .readout')).to_contain_text('128 numbers')
    te = train(nn.Linear(8, 1031), 'odd', 3)
    with opened(chromium, report(te, tmp_path/'b.html'), '#tensors=weight') as page: expect(page.locator('#sizes .readout')).to_contain_text('8,248 numbers')


@pytest.mark.slow
def test_the_table_of_a_long_run_is_exact_and_charts_name_their_steps(chromium, tmp_path):
    steps = 2500
    df = pd.DataFrame(dict(path='a', ttype='output', tname='output_0', step=range(steps), std=np.random.default_rng(0).lognormal(size=steps)))
    with opened(chromium, report(df, tmp_path/'a.html')) as page:
        row = cells(page)[0]
        np.testing.assert_allclose([float(v) for v in row[2:6]], [df['std'].iloc[0], df['std'].iloc[-1], df['std'].min(), df['std'].max()], rtol=1e-3)
        assert row[1]=='2,500'
        expect(page.locator('#heat .readout')).to_contain_text(re.compile(r'one of steps 2,49\d to 2,499'))
        expect(page.locator('#small')).to_contain_text('Of neighbouring steps')
    with opened(chromium, report(df[df.step%100==0], tmp_path/'a.html')) as page:
        expect(page.locator('#heat .readout')).to_contain_text('a, step 2,400: ')
        assert 'neighbouring' not in page.locator('#small').inner_text()


def test_report_accepts_paths_and_selections(tmp_path):
    te = train(net(), 'paths', 2)
    (tmp_path/'b.html').write_text('old')
    (tmp_path/'a.html').symlink_to('b.html')
    report(te, tmp_path/'a.html')
    assert (tmp_path/'a.html').is_symlink() and 'paths' in (tmp_path/'b.html').read_text('utf-8')
    (tmp_path/'paths.html').mkdir()
    with pytest.raises(FileExistsError, match='is not a file'): report(te, tmp_path)
    with pytest.raises(FileNotFoundError, match='The folder .*new.* does not exist'): report(te, f'{tmp_path}/new/')
    for name in ('stats', 'ttype', 'path'):
        with pytest.raises(ValueError, match=f'{name}= is an empty list'): report(te, tmp_path/'c.html', **{name: []})
    assert report(te, str(tmp_path/('x'*240+'.html'))).exists()
    assert 'paths' in report(str(te.t.log_path), tmp_path/'c.html').read_text('utf-8')
    csv = tmp_path/'t.csv'
    te.t.df.to_csv(csv, index=False)
    report(pd.read_csv(csv), tmp_path/'d.html')
    report('paths', tmp_path/'e.html', home=te.t.dir)
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith('.'))==[]
