"Tests of a board in a real browser: live rows, reactions to the pointer, links that restore a view, and harmless names"
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import expect

expect.set_options(timeout=30_000)
evil = '<img src=x onerror="window.hit=1">'


@contextmanager
def opened(chromium, address, **context):
    "Open the page of a run. `page.wrong` lists its errors"
    with chromium('EXCLUDE 127.0.0.1').new_context(**{'viewport': {'width': 1300, 'height': 900}, **context}) as context:
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.wrong,page.asked = [],[]
        page.on('pageerror', lambda e: page.wrong.append(str(e)))
        page.on('console', lambda m: m.type=='error' and page.wrong.append(m.text))
        context.on('request', lambda r: page.asked.append(r.url))
        page.goto(address)
        page.wait_for_selector('html[data-ready]')
        drawn(page)
        yield page


def drawn(page): page.evaluate('() => new Promise(requestAnimationFrame).then(() => drawing)')
def seen(page):
    of_state = ', '.join(f'state.{k}' for k in ('kind', 'stat', 'path', 'label', 'step', 'words', 'sort', 'down'))
    return page.evaluate(f'[data.run.name, compared, {of_state}, which, zoom]')
def run_row(page, name): return page.locator('#runs tbody tr').filter(has=page.get_by_role('button', name=name, exact=True))
def pick(page, name):
    page.get_by_role('button', name=name, exact=True).click()
    expect(page.locator('h1')).to_have_text(name)
    drawn(page)


@pytest.fixture(scope='module')
def address(home):
    "Return the address of a board in its own process"
    asked = [sys.executable, '-m', 'torchember', 'board', '--port', '0', '--no-browser', '--home', str(home)]
    with subprocess.Popen(asked, stdout=subprocess.PIPE, text=True, env={**os.environ, 'TORCHEMBER_BOARD_TOKEN': 'secret'}) as p:
        try:
            address = p.stdout.readline().strip()
            assert address.endswith('/?token=secret')
            yield address
        finally: p.terminate()


def test_what_is_written_arrives(chromium, served, training):
    t = training('going').steps(6)
    with served() as address, opened(chromium, address) as page:
        expect(page.locator('#facts')).to_contain_text('6 steps, 0 to 5')
        expect(page.locator('#facts')).to_contain_text('going on')
        # Folded rows, the typed text and the focus must survive an update
        page.locator('#tree [role=treeitem]').nth(3).locator('.fold').click()
        page.locator('#search').fill('2')
        page.locator('#number').focus()
        page.evaluate('window.first = charts.numbers; window.row = $("#runs tbody tr")')
        t.steps(3)
        expect(page.locator('#facts')).to_contain_text('9 steps, 0 to 8')
        expect(run_row(page, 'going').locator('td').nth(2)).to_have_text('9')
        drawn(page)
        # The view follows the last step
        assert page.evaluate('[state.step, charts.numbers.data[0].length, charts.heat.data[0].length, +$("#step").max]')==[8, 9, 9, 8]
        assert page.evaluate('charts.numbers !== first && modules.filter(m => !m.open).map(m => m.path).join() === "2" && $("#search").value === "2"')
        expect(page.locator('#number')).to_be_focused()
        page.evaluate('choose({ step: 3 })')
        drawn(page)
        other = training('later').steps(2)
        t.steps(2)
        expect(page.locator('#facts')).to_contain_text('11 steps, 0 to 10')
        drawn(page)
        assert page.evaluate('state.step')==3 # The view stays at a step that the user has selected
        expect(page.locator('#count')).to_have_text('(2, 2 going on)')
        assert page.locator('#runs tbody tr th button').all_inner_texts()==['later', 'going'] or page.locator('#runs tbody tr').count()==2
        other.close()
        expect(run_row(page, 'later')).to_contain_text('ended')
        t.close()
        expect(page.locator('#facts')).to_contain_text('ended')
        assert not page.wrong and not [u for u in page.asked if urlsplit(u).netloc not in (urlsplit(address).netloc, '')]


def test_the_pointer_moves_everything(chromium, address):
    with opened(chromium, address+'#run=fine&tensors=output&at=2.0&step=19') as page:
        expect(page.locator('#sizes h2')).to_contain_text('step 19')
        colours = page.evaluate('patches.map(([e]) => e.style.background)')
        box = page.locator('#numbers .u-over').bounding_box()
        page.mouse.move(box['x']+box['width']*4/19, box['y']+box['height']*.1)
        expect(page.locator('#numbers .readout')).to_contain_text('step 4: train_loss')
        # The text is about the selected row, not about the row under the pointer
        expect(page.locator('#heat .readout')).to_contain_text('2.0, step 4: ')
        expect(page.locator('#stepout')).to_have_text('4')
        expect(page.locator('#sizes h2')).to_contain_text(re.compile('step [2-6]$'))
        expect(page.locator('#lines .readout')).to_contain_text(re.compile(r'2\.0 [\d.]+'))
        for chart in 'heat','lines': assert page.evaluate(f'Math.round(charts.{chart}.posToVal(charts.{chart}.cursor.left, "x"))')==4
        drawn(page)
        assert page.evaluate('patches.map(([e]) => e.style.background)')!=colours and page.evaluate('state.step')==19
        page.mouse.move(2, 2)
        expect(page.locator('#stepout')).to_have_text('19')
        expect(page.locator('#sizes h2')).to_contain_text('step 19')
        drawn(page)
        assert page.evaluate('patches.map(([e]) => e.style.background)')==colours
        page.mouse.click(box['x']+box['width']*6/19, box['y']+20)
        drawn(page)
        assert page.evaluate('state.step')==6 and page.locator('#step').input_value()=='6'
        assert not page.wrong


def test_three_clicks_lead_to_the_layer_that_went_nan(chromium, address):
    with opened(chromium, address) as page:
        expect(run_row(page, 'broken')).to_contain_text('train_loss NaN')
        expect(run_row(page, 'broken').locator('.says')).to_have_text('1 error first not finite: step 12, weight of 2.0.weight (1 NaN)')
        pick(page, 'broken')
        page.locator('#health li button').first.click()
        drawn(page)
        assert page.evaluate('[state.path, state.step, state.kind]')==['2.0', 12, 'weight']
        expect(page.locator('#tree [aria-selected=true]')).to_have_attribute('title', '2.0 (Linear)')
        assert not page.wrong


def test_runs_are_compared_by_a_click(chromium, address):
    with opened(chromium, address+'#run=fine&tensors=output&at=2.0') as page:
        # Two lines: the training loss and the validation loss
        assert page.evaluate('[$("#numbers").dataset.lines, $("#lines").dataset.lines]')==['2', '7']
        assert page.locator('#runs input[type=checkbox]:disabled').count()==1
        page.get_by_label('Compare with other').check()
        expect(page.locator('#numbers .readout')).to_contain_text('train_loss of other')
        drawn(page)
        assert page.evaluate('[$("#numbers").dataset.lines, $("#lines").dataset.lines]')==['3', '8']
        expect(page.locator('#lines .readout')).to_contain_text('2.0 of other')
        y = page.evaluate('numbers(besides[0].numbers.find(n => n.name === "train_loss").value).then(v => Array.from(v))')
        assert page.evaluate('charts.numbers.data[3].filter(v => v != null)')==y and len(y)==15
        page.get_by_label('Compare with broken').check()
        expect(page.locator('#numbers .readout')).to_contain_text('train_loss of broken')
        page.get_by_label('Compare with other').uncheck()
        expect(page.locator('#numbers .readout')).not_to_contain_text('train_loss of other')
        assert seen(page)[:2]==['fine', ['broken']] and 'with=broken' in page.url and 'with=other' not in page.url
        pick(page, 'broken')
        drawn(page)
        assert seen(page)[:2]==['broken', []]
        assert not page.wrong


def test_a_search_filters_everything(chromium, address):
    with opened(chromium, address+'#run=broken&tensors=output') as page:
        assert page.locator('#layers tbody tr').count()==7 and page.locator('#health li:visible').count()>=1
        page.keyboard.press('/')
        page.keyboard.type('tanh')
        drawn(page)
        assert page.locator('#layers tbody tr').all_inner_texts()[0].startswith('2.1') and page.locator('#layers tbody tr').count()==1
        assert page.evaluate('[charts.heat.scales.y.max, charts.lines.series.length]')==[1, 2]
        assert page.evaluate('[...document.querySelectorAll("#tree [role=treeitem]")].map(e => e.title)')==['Sequential', '2 (Sequential)', '2.1 (Tanh)'] or \
            page.locator('#tree [role=treeitem]').count()==3
        assert page.locator('#health li:visible').count()==0
        page.keyboard.press('Escape')
        drawn(page)
        assert page.locator('#layers tbody tr').count()==7 and page.locator('#health li:visible').count()>=1
        typed = '''async () => {
            $('#search').value = 'tanh'
            $('#search').dispatchEvent(new Event('input'))
            await put(data, data.run.name, onPage.compared)
            return [state.words, $('#search').value, $('#layers tbody').children.length]
        }'''
        # The typed text stays, also if a newer page arrives before the drawing
        assert page.evaluate(typed)==['tanh', 'tanh', 1]
        assert not page.wrong


def test_a_link_shows_what_its_sender_saw(chromium, address):
    with opened(chromium, address) as page:
        pick(page, 'broken')
        page.locator('#kind').select_option('weight_grad')
        page.locator('#stat').select_option('rms')
        page.get_by_label('Compare with fine').check()
        expect(page.locator('#numbers .readout')).to_contain_text('of fine')
        page.locator('#number').select_option(label='val_loss')
        drawn(page)
        page.evaluate('choose({ label: "2.0.weight", step: 5 })')
        page.locator('#search').fill('wei')
        drawn(page)
        page.locator('#layers thead button', has_text='highest').click()
        page.locator('#numbers .chart').scroll_into_view_if_needed()
        box = page.locator('#numbers .u-over').bounding_box()
        page.mouse.move(box['x']+box['width']*.2, box['y']+9)
        page.mouse.down()
        page.mouse.move(box['x']+box['width']*.7, box['y']+9, steps=3)
        page.mouse.up()
        page.mouse.move(2, 2)
        drawn(page)
        want,link = seen(page),page.url
        assert want[:9]==['broken', ['fine'], 'weight_grad', 'rms', '2.0', '2.0.weight', 5, 'wei', 5] and want[10]>0 and want[11]['min']>2
        rows = page.locator('#layers tbody').inner_text()
    with opened(chromium, link) as page:
        expect(page.locator('#numbers .readout')).to_contain_text('of fine')
        drawn(page)
        assert seen(page)==want and page.locator('#layers tbody').inner_text()==rows and page.locator('#search').input_value()=='wei'
        assert page.evaluate('[charts.heat.scales.x.min, charts.heat.scales.x.max]')==[want[11]['min'], want[11]['max']]
        page.evaluate("location.hash = '#run=other&tensors=weight&step=3'")
        expect(page.locator('h1')).to_have_text('other')
        drawn(page)
        assert seen(page)[:8]==['other', [], 'weight', seen(page)[3], None, None, 3, ''] and page.url.count('#')==1
        page.go_back()
        expect(page.locator('h1')).to_have_text('broken')
        assert not page.wrong


def test_the_newest_step_is_linked_as_such(chromium, address):
    with opened(chromium, address+'#run=fine') as page: assert 'step=last' in page.url and page.evaluate('state.step')==19
    with opened(chromium, address+'#run=fine&step=7') as page: assert 'step=7' in page.url


def test_names_are_names(chromium, tmp_path, home, served):
    shutil.copytree(home, tmp_path/'home')
    log = tmp_path/'home'/'log'
    text = (log/'broken').read_text()
    hostile = {'.0(Linear)': ".<img src=x onerror='hit=1'>(Linear)", '(Tanh)': '(<b>Tanh</b>)', 'train_loss': '<u>loss</u>'}
    for old,new in hostile.items(): text = text.replace(old, new)
    said = dict(severity='error', rule='<i>x</i>', text='`<script>hit=1</script>`', first_step=1, last_step=1, ttype='finding', tname='x', module='a')
    said |= dict(step=1, call=0)
    finding = json.dumps(said, separators=(',', ':'))+'\n'
    (log/evil).write_text(text+finding)
    shutil.copy(tmp_path/'home'/'data'/'base_broken.json', tmp_path/'home'/'data'/f'base_{evil}.json')
    with served(home=tmp_path/'home') as address, opened(chromium, address+'#run=fine') as page:
        pick(page, evil)
        assert page.title()==f'{evil} · torchember'
        page.get_by_label('Compare with fine').check()
        expect(run_row(page, evil)).to_contain_text('<u>loss</u>')
        drawn(page)
        expect(page.locator('#number')).to_contain_text('<u>loss</u>')
        assert page.evaluate('[window.hit, document.querySelectorAll("img, b b, u, i, #health script").length, typeof hit]')==[None, 0, 'undefined']
        assert not page.wrong
        # The content policy blocks an injected script
        with page.expect_event('console', lambda m: 'Content Security Policy' in m.text):
            page.evaluate('e => document.body.insertAdjacentHTML("beforeend", e)', evil.replace('src=x', 'src="data:,"'))
        assert page.evaluate('window.hit') is None


def test_keys_are_enough(chromium, address):
    with opened(chromium, address+'#run=fine') as page:
        page.locator('#runs summary').focus()
        for _ in range(2): page.keyboard.press('Tab')
        first = page.evaluate('document.activeElement.closest("tr").rowIndex')
        page.get_by_role('button', name='fine', exact=True).focus()
        at = page.evaluate('document.activeElement.textContent')
        assert first>=1 and at=='fine'
        order = page.locator('#runs tbody th button').all_inner_texts()
        step = 'ArrowUp' if order.index('broken')<order.index('fine') else 'ArrowDown'
        for _ in range(abs(order.index('broken')-order.index('fine'))): page.keyboard.press(step)
        assert page.evaluate('document.activeElement.textContent')=='broken'
        page.keyboard.press('Enter')
        expect(page.locator('h1')).to_have_text('broken')
        drawn(page)
        # The focus survives a redraw of the list
        expect(page.get_by_role('button', name='broken', exact=True)).to_be_focused()
        for _ in order: page.keyboard.press('ArrowUp')
        assert page.evaluate('document.activeElement.textContent')==order[0]
        page.get_by_label('Compare with other').focus()
        page.keyboard.press('Space')
        expect(page.locator('#numbers .readout')).to_contain_text('of other')
        expect(page.get_by_label('Compare with other')).to_be_focused()
        page.locator('#heat .chart').focus()
        before = page.evaluate('state.step')
        page.keyboard.press('ArrowLeft')
        drawn(page)
        assert page.evaluate('state.step')==before-1
        assert not page.wrong


@pytest.mark.parametrize('dark', [False, True])
def test_it_fits_a_phone(chromium, address, dark):
    look = dict(viewport={'width': 390, 'height': 844}, has_touch=True, is_mobile=True, color_scheme='dark' if dark else 'light')
    with opened(chromium, address+'#run=fine', **look) as page:
        assert page.evaluate('[document.documentElement.scrollWidth, document.documentElement.dataset.theme]')==[390, 'dark' if dark else 'light']
        inside = page.evaluate('[...document.querySelectorAll("#runs tbody th, #runs tbody td, .chart")].every(e => e.getBoundingClientRect().right <= 391)')
        assert inside and min(e.bounding_box()['width'] for e in page.locator('#runs tbody th').all())>120
        page.get_by_role('button', name='broken', exact=True).tap()
        expect(page.locator('h1')).to_have_text('broken')
        page.locator('#health li button').first.tap()
        drawn(page)
        assert page.evaluate('[state.path, state.step]')==['2.0', 12] and not page.wrong


def test_it_is_there_again_when_the_server_is(chromium, training, served):
    t = training('going').steps(3)
    with ExitStack() as server:
        address = server.enter_context(served())
        with opened(chromium, address) as page:
            expect(page.locator('#link')).to_be_hidden()
            port = urlsplit(address).port
            for n,shown,token in ((5, 5, 'secret'), (7, 5, 'another'), (7, 7, 'secret')):
                server.close()
                expect(page.locator('#link')).to_contain_text('The board is away')
                if n>t.n: t.steps(n-t.n)
                server.enter_context(served(port=port, token=token))
                if token!='secret': page.wait_for_timeout(1000)
                else: expect(page.locator('#link')).to_be_hidden()
                expect(page.locator('#facts')).to_contain_text(f'{shown} steps')
                assert page.locator('#link').is_visible()==(token!='secret')
            assert page.evaluate('charts.numbers.data[0].length')==7


def test_what_is_not_there_is_said(chromium, address, tmp_path, served):
    with chromium('EXCLUDE 127.0.0.1').new_context() as context:
        page = context.new_page()
        page.goto(address+'#run=gone')
        expect(page.locator('#link')).to_have_text('There is no run gone here.')
        page.get_by_role('button', name='fine', exact=True).click()
        expect(page.locator('h1')).to_have_text('fine')
        expect(page.locator('#link')).to_be_hidden()
        with served(home=tmp_path) as empty:
            page.goto(empty)
            expect(page.locator('#link')).to_have_text('There are no runs here yet.')
            (tmp_path/'log').mkdir()
            (tmp_path/'log'/'odd').write_text('nothing\n')
            expect(page.locator('#count')).to_have_text('(1)')
            expect(page.locator('#link')).to_contain_text('no rows')
