"Tests of the answers of a board: access, runs, live updates, and that it only reads"
import gzip
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from base64 import b64encode
from contextlib import contextmanager
from hashlib import sha256
from urllib.parse import urlsplit

import programs
import pytest
from starlette.testclient import TestClient

from torchember import compact, diagnose, read
from torchember.frames.handle import Home, open_run, run_state
from torchember.show.board.listing import Listing
from torchember.show.board.server import Board, Pages, board, render_board, bind_socket
from torchember.show.board.some_steps import run_of_steps
from torchember.show.live.following import FollowedLog, KeptLines, Sparkline, may_have_grown, rows_of_interest
from torchember.show.page.data import page_of
from torchember.store.jsonl import emberTracker

evil = '<img src=x onerror="window.hit=1">'


@contextmanager
def asking(*runs, home=None, host='localhost', **kwargs):
    b = Board(runs, home, 'secret', **kwargs)
    b.every = 0.
    with TestClient(b.app(), f'http://{host}') as asks: yield asks


def names(asks):
    listing = asks.app.app.routes[0].endpoint.__self__.listing
    listing.look()
    return [r['name'] for r in listing.rows]


def files(home): return {p: (s.st_size, s.st_mtime_ns, s.st_ino) for p in sorted(home.rglob('*')) for s in [p.lstat()]}


# ---- access with a token

@pytest.mark.parametrize('path', ['/', '/run?name=fine', '/events', '/nowhere', '/run?name=fine&x=token', '//', '/../', '/user/ada/'])
def test_who_has_not_the_token_is_told_nothing(home, path):
    with asking(home=home) as asks:
        for token in (None, '', 'secre', 'secret0', 'SECRET', 'secret\0', 'ſecret'):
            r = asks.get(path, params={**dict(p.split('=') for p in urlsplit(path).query.split('&') if p), **({'token': token} if token is not None else {})})
            assert r.status_code==403 and 'token' in r.text and 'fine' not in r.text and '<' not in r.text, (path, token)
        assert asks.get('/run?name=fine&token=wrong&token=secret').status_code==403 # Of two tokens, the first counts
        assert asks.post('/').status_code==403


def test_a_token_that_was_not_given_is_one_that_nobody_guesses(home, monkeypatch):
    tokens = {Board(home=home).token for _ in range(50)}
    assert len(tokens)==50 and min(map(len, tokens))>=20


def test_other_names_are_refused(home):
    def told(host, **kwargs):
        with asking(home=home, **kwargs) as asks: return asks.get('/?token=secret', headers={'host': host}).status_code
    for h in ('localhost', 'localhost:8088', 'LOCALHOST:1', '127.0.0.1:8088', '127.0.0.1', '[::1]:8088', '192.168.1.7:99'): assert told(h)==200, h
    for h in ('evil.example', 'evil.example:8088', 'localhost.evil.example', '127.0.0.1.evil.example', '', 'localhost:8088:evil', '[::1.evil', 'testserver'):
        assert told(h)==403, h
    assert told('hub.example.org', hosts=['Hub.Example.org'])==200 and told('hub.example.org:444', hosts=['hub.example.org'])==200
    assert told('hub.example.org.evil.example', hosts=['hub.example.org'])==403 and told('any.example', hosts=['*'])==200


def test_only_reading_is_there(home):
    before = files(home)
    with asking(home=home) as asks:
        for path in ('/', '/run', '/events'):
            for method in ('POST', 'PUT', 'DELETE', 'PATCH', 'OPTIONS', 'TRACE'):
                assert asks.request(method, f'{path}?token=secret&name=fine').status_code==405
        assert asks.get('/?token=secret').status_code==asks.get('/run?token=secret&name=fine').status_code==200
        assert asks.get('/nowhere?token=secret').status_code==404
    assert files(home)==before


def test_what_is_sent_can_run_nothing_but_our_scripts(home):
    with asking(home=home) as asks:
        answers = [asks.get(p) for p in ('/?token=secret', '/run?token=secret&name=fine', '/run?token=secret&name=x', '/', '/nowhere?token=secret')]
    for r in answers:
        assert r.headers['x-content-type-options']=='nosniff' and r.headers['cache-control']=='no-store' and r.headers['referrer-policy']=='no-referrer'
        assert 'set-cookie' not in r.headers and 'access-control-allow-origin' not in r.headers
        policy = dict(p.strip().split(' ', 1) for p in r.headers['content-security-policy'].split(';'))
        assert policy['default-src']=="'none'" and policy['connect-src']=="'self'" and policy['base-uri']=="'none'" and policy['form-action']=="'none'"
        assert 'unsafe' not in str(policy) and '*' not in str(policy)
    page = answers[0].text
    for tag,of in (('script', policy['script-src']), ('style', policy['style-src'])):
        inside = re.findall(f'<{tag}>(.*?)</{tag}>', page, re.S)
        assert len(inside)==3 and of.split()==[f"'sha256-{b64encode(sha256(s.encode()).digest()).decode()}'" for s in inside]
    assert answers[0].headers['content-type'].startswith('text/html') and answers[1].headers['content-type']=='application/json'
    assert 'http-equiv' not in page and '{' not in page[:page.index('<style>')] and 'style=' not in re.sub('<(script|style)>.*?</', '', page, flags=re.S)


def test_what_is_asked_for_is_in_the_title_as_text(): assert f'<title>{"&lt;img src=x onerror=&quot;window.hit=1&quot;&gt;"} ·' in render_board(evil)[0]


# ---- runs that a board shows

def test_nothing_but_runs_of_the_home_can_be_asked_for(home, tmp_path):
    (tmp_path/'home'/'log').mkdir(parents=True)
    (tmp_path/'home'/'data').mkdir()
    secret = '{"step":0,"ttype":"scalar","tname":"scalar","module":"","call":0,"loss":0.125}\n'
    (tmp_path/'outside').write_text(secret)
    for name in ('inside', 'hidden'): (tmp_path/'home'/'log'/name).write_text(secret)
    (tmp_path/'home'/'log'/'link').symlink_to(tmp_path/'outside')
    (tmp_path/'home'/'log'/'near').symlink_to(tmp_path/'home'/'log'/'inside')
    with asking('in*', 'near', 'link', home=tmp_path/'home') as asks:
        # Links to files outside of the home, and runs that were not requested, are not shown
        assert set(names(asks))=={'inside', 'near'}
        for name in ('link', 'hidden', '../outside', '../../outside', '/etc/passwd', 'log/inside', './inside', '..', '.', '', 'inside\0', '*', '%2e%2e/outside',
                     str(tmp_path/'outside')):
            assert asks.get('/run', params={'token': 'secret', 'name': name}).status_code==404, name
        assert asks.get('/run?token=secret&name=inside').json()['numbers'][0]['name']=='loss'
        for path in ('/../outside', '/%2e%2e/outside', '/log/inside', '/..%2foutside'): assert asks.get(f'{path}?token=secret').status_code==404


def test_names_and_rows_are_data(tmp_path):
    (tmp_path/'log').mkdir()
    (tmp_path/'data').mkdir()
    row = {'step': 0, 'ttype': 'scalar', 'tname': 'scalar', 'module': evil, 'call': 0, '</script><script>': 1.5}
    odd = '{"step": "<b>", "ttype": "scalar", "x": 1}\n[1]\n"ttype":"scalar"\n{"ttype":"finding","step":1,"severity":"error","text":"<script>hit</script>"}\n'
    (tmp_path/'log'/evil).write_text(json.dumps(row)+'\n'+odd)
    (tmp_path/'log'/'nonsense').write_bytes(bytes(range(256))*99)
    (tmp_path/'log'/'folder').mkdir()
    os.mkfifo(tmp_path/'log'/'pipe')
    (tmp_path/'data'/'base_nonsense.json').write_text('[]')
    with asking(home=tmp_path) as asks:
        assert {evil, 'nonsense'}<={*names(asks)}
        front = asks.get('/?token=secret').text
        assert 'onerror' not in front.replace('heard.onerror', '')
        for name in names(asks):
            r = asks.get('/run', params={'token': 'secret', 'name': name})
            assert r.status_code==200 and r.headers['content-type']=='application/json' and r.headers['content-encoding']=='gzip'
            json.loads(r.text, parse_constant=lambda c: pytest.fail(c))


@pytest.mark.parametrize('prefix', ['/user/ada/proxy/8088', '/proxy/absolute/8088', '/a/run', '/run/events'])
def test_it_stands_behind_proxies_that_keep_their_prefix(home, prefix):
    with asking(home=home) as asks:
        assert '<title>' in asks.get(f'{prefix}/?token=secret').text
        assert asks.get(f'{prefix}/run?token=secret&name=fine').json()['run']['name']=='fine'
        assert asks.get(f'{prefix}/x?token=secret').status_code==404


def test_all_addresses_in_the_page_are_relative():
    page = re.sub(r'/\*.*?\*/', '', render_board()[0], flags=re.S)
    assert not re.search(r'''(?:src|href|action)\s*=\s*["'](?!data:|#)''', page) and not re.search(r'''(?:fetch|EventSource|at|import|open)\(\s*["'`]/''', page)
    assert set(re.findall(r"\bat\('(\w+)'", page))=={'run', 'events'} and 'location.origin' not in page and 'location.host' not in page


def test_a_page_is_that_of_the_report(home):
    with asking(home=home) as asks: got = asks.get('/run?token=secret&name=broken').json()
    want = page_of(emberTracker('broken', home))
    version = got.pop('version')
    assert version.endswith('.1') and got==json.loads(json.dumps(want)) and got['trouble']['path']=='2.0' and got['trouble']['step']==12


def test_the_list_is_that_of_the_logs(home):
    rows = {r['name']: r for r in [*listed(home)]}
    assert list(rows)==sorted(rows, key=lambda n: rows[n]['start'], reverse=True) and set(rows)=={'fine', 'broken', 'other'}
    for name,r in rows.items():
        df = read(name, home=home)
        assert (r['steps'], r['rows'], r['model'], r['state'], r['ranks'])==(df.step.max()+1, len(df), 'Sequential', 'ended', 1)
        loss = df[df.ttype=='scalar'].train_loss.dropna()
        assert r['spark']==[float(f'{v:.5g}') for v in loss] and r['loss']==['train_loss', loss.iloc[-1] if name!='broken' else None]
    assert rows['fine']['errors']==rows['fine']['warnings']==0 and rows['fine']['finding'] is None
    assert rows['broken']['errors']==1 and rows['broken']['finding']=='first not finite: step 12, weight of 2.0.weight (1 NaN)'
    json.dumps([*rows.values()], allow_nan=False)


def listed(home, *names):
    there = Listing(home, names)
    there.look()
    there.close()
    return there.rows


def test_parts_in_parquet_are_listed_alike(home, tmp_path):
    shutil.copytree(home, tmp_path/'home')
    want = {r['name']: r for r in listed(home)}
    compact('broken', home=tmp_path/'home')
    got = {r['name']: r for r in listed(tmp_path/'home')}
    for k in ('steps', 'rows', 'loss', 'spark', 'errors', 'finding', 'state', 'start'): assert got['broken'][k]==want['broken'][k], k
    with asking(home=tmp_path/'home') as asks: page = asks.get('/run?token=secret&name=broken').json()
    assert page['trouble']==page_of(emberTracker('broken', home))['trouble']


def test_processes_of_a_run_are_one(home, tmp_path):
    for sub in 'log','data': (tmp_path/sub).mkdir()
    for rank,of in enumerate(('fine', 'broken')):
        (tmp_path/'log'/f'both.rank{rank}').write_bytes((home/'log'/of).read_bytes())
        (tmp_path/'data'/f'base_both.rank{rank}.json').write_bytes((home/'data'/f'base_{of}.json').read_bytes())
    for wanted in ((), ('both',), ('b*',), ('both.rank*',)):
        r, = listed(tmp_path, *wanted)
        # The loss is that of the first process
        assert (r['name'], r['ranks'], r['errors'], r['steps'])==('both', 2, 1, 20) and r['loss'][1] is not None
    assert not listed(tmp_path, 'bot')
    with asking(home=tmp_path) as asks: got = asks.get('/run?token=secret&name=both').json()
    assert got['run']['name']=='both' and got['kinds']==json.loads(json.dumps(page_of(open_run('both', tmp_path))))['kinds']


def test_the_first_trouble_is_that_of_the_training():
    def line(**r): return json.dumps({'step': 0, 'module': 'Net.a(Linear)', 'ttype': 'output', **r}, separators=(',', ':')).encode()+b'\n'
    data = line(nan=1, phase='eval')+line(step=1, nan=0)+line(step=2, nan=3)+line(step=3, nan=4)+line(step=4, ttype='scalar', x=1.)
    assert [r['step'] for r in rows_of_interest(data)]==[0, 2, 4] and [r['step'] for r in rows_of_interest(data, False)]==[4]
    assert [r['step'] for r in rows_of_interest(data.rstrip())]==[0, 2, 4] # The last line may lack its line end
    assert [r['step'] for r in rows_of_interest(data.replace(b':', b': '))]==[0, 2, 4]
    assert [r['step'] for r in rows_of_interest(line(posinf=1))]==[r['step'] for r in rows_of_interest(line(neginf=1))]==[0]


def test_a_curve_has_few_points_and_all_values():
    s = Sparkline()
    for i in range(1000): s.add(float(i))
    assert 64<=len(s.points)<128 and sum(n for _,n in s.points)==1000 and sum(v for v,_ in s.points)==sum(range(1000)) and s.last==999
    assert {n for _,n in s.points[:-1]}=={s.each}


# ---- running trainings

def test_what_is_new_is_seen_and_only_that(training):
    there = Listing()
    assert there.look() and there.rows==[]
    t = training('going').steps(3)
    assert there.look() and not there.look()
    first, = there.rows
    t.steps(2)
    assert there.look() and not there.look()
    second, = there.rows
    assert (first['steps'], second['steps'])==(3, 5) and len(second['spark'])==5 and second['version']!=first['version'] and second['state']=='running'
    path = t.te.t.log_path
    t.close()
    assert there.look() and there.rows[0]['state']=='ended' and there.rows[0]['end']
    path.unlink()
    assert there.look()
    again = training('going2').steps(1)
    there.look()
    assert 'going2' in [r['name'] for r in there.rows]
    path = again.te.t.log_path
    again.close()
    text = path.read_bytes().replace(b'train_loss', b'other_loss')
    path.unlink()
    path.write_bytes(text+text.splitlines(keepends=True)[-1]) # Another file replaces the log of this name
    there.look()
    assert next(r for r in there.rows if r['name']=='going2')['loss'][0]=='other_loss'
    there.close()


def test_a_file_that_has_grown_is_the_same():
    assert may_have_grown((1, 10, 0), (1, 20, 1)) and may_have_grown((1, 10, 0), (1, 10, 0)) and may_have_grown(None, None)
    for before,now in (((1, 10, 0), (2, 20, 1)), ((1, 10, 0), (1, 9, 1)), ((1, 10, 0), None), (None, (1, 1, 1))): assert not may_have_grown(before, now)


def test_what_became_of_a_run(tmp_path):
    from socket import gethostname
    here,there,log = {'host': gethostname(), 'pid': os.getpid()},{'host': 'elsewhere', 'pid': 1},tmp_path/'log'
    of = here, {**here, 'pid': 2**31-2}, {}, {'host': 'elsewhere'}, there
    assert [run_state(base, log) for base in of]==['running', 'died', 'ended', 'ended', 'silent']
    for host in here,there: assert run_state({**host, 'end': 'x'}, log)=='ended'
    log.touch()
    assert run_state(there, log)=='running'
    os.utime(log, (time.time()-299,)*2)
    assert run_state(there, log)=='running'
    os.utime(log, (time.time()-301,)*2)
    assert run_state(there, log)=='silent'


def test_a_page_that_has_not_changed_is_not_sent_again(training):
    t = training('going').steps(3)
    with asking() as asks:
        def ask(have=''): return asks.get('/run', params={'token': 'secret', 'name': 'going', 'have': have})
        first = ask()
        assert first.status_code==200 and ask(first.json()['version']).status_code==204 and ask(1).status_code==200 and ask(1).content==first.content
        t.steps(1)
        time.sleep(.3) # A page is computed again only after a pause
        asks.app.app.routes[0].endpoint.__self__.pages.share = 0
        second = ask(first.json()['version'])
        assert second.status_code==200 and second.json()['run']['steps']==4 and second.json()['version']!=first.json()['version']


def test_a_page_is_made_when_a_share_of_the_time_has_gone(training):
    t = training('going').steps(2)
    there = Listing()
    there.look()
    pages = Pages(there)
    def steps(): return json.loads(gzip.decompress(pages.of('going')[0]))['run']['steps']
    assert steps()==2
    pages.share = 1e6
    t.steps(1)
    there.look()
    assert steps()==2 # The pause has not ended, so the page is not computed again
    t.close()
    there.look()
    assert steps()==3 # The run has ended, so its last page is computed
    assert pages.of('nothing')==(None, None) and list(pages.made)==['going']
    there.close()


@contextmanager
def events(address):
    "Yield the lists of runs that a board sends to a browser"
    at = urlsplit(address)
    c = http.client.HTTPConnection(at.hostname, at.port, timeout=20)
    c.request('GET', f'/events?{at.query}')
    r = c.getresponse()
    assert r.status==200 and r.headers['content-type'].startswith('text/event-stream') and r.headers['content-security-policy']
    def said():
        while line := r.readline():
            if line.startswith(b'data: '): yield json.loads(line[6:])
    try: yield said()
    finally: c.close()


def test_rows_are_told_while_they_are_written(training, served):
    t = training('going').steps(2)
    with served() as address, events(address) as said:
        assert [r['steps'] for r in next(said)]==[2]
        for n in 3,4:
            t.steps(1)
            r, = next(r for r in said if r[0]['steps']==n)
            assert len(r['spark'])==n and r['state']=='running'
        t.close()
        assert next(r for r in said if r[0]['state']!='running')[0]['state']=='ended'


died = """
import sys, time, torch
from torchember import torchEmber
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
opt = torch.optim.SGD(model.parameters(), .1)
te = torchEmber(model, opt, name='killed', home=sys.argv[1])
class Stuck(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x
    @staticmethod
    def backward(ctx, g): print('stuck', flush=True); time.sleep(600)
for i in range(4):
    loss = model(torch.ones(2, 4)).sum()
    te.log(loss=loss)
    (Stuck.apply(loss) if i==3 else loss).backward()
    opt.step()
"""


def test_a_training_that_is_killed_leaves_its_last_words(tmp_path, served):
    with programs.start(died, tmp_path) as p:
        try:
            assert p.stdout.readline()=='stuck\n', p.stderr.read()
            with served(home=tmp_path) as address, events(address) as said:
                assert next(r for r in said if r)[0]['state']=='running'
                os.kill(p.pid, signal.SIGKILL)
                p.wait()
                r = next(r for r in said if r[0]['state']!='running' and r[0]['finding'])[0]
                assert r['state']=='died' and r['errors']==1 and r['finding'].startswith('The training died in step 3')
                assert not list((tmp_path/'box').glob('*.box'))
                with asking(home=tmp_path) as asks: page = asks.get('/run?token=secret&name=killed').json()
        finally: p.kill()
    assert 'The training died in step 3' in json.dumps(page['health']) and 'died' in str(diagnose('killed', home=tmp_path))


# ---- the command `torchember board`

def test_a_board_needs_no_torch(home, tmp_path):
    program = """
import sys
from starlette.testclient import TestClient
from torchember.show.board.server import Board
with TestClient(Board(home=sys.argv[1], token='s').app(), 'http://localhost') as asks: assert asks.get('/run?name=broken&token=s').json()['trouble']
print([m for m in ('torch', 'jax') if m in sys.modules])
"""
    said = subprocess.run([sys.executable, '-c', program, str(home)], capture_output=True, text=True, timeout=120)
    assert said.stdout=='[]\n', said.stderr


def test_the_command_says_the_address_and_ends_with_ctrl_c(home):
    asked = [sys.executable, '-m', 'torchember', 'board', 'fi*', '--port', '0', '--no-browser', '--home', str(home)]
    with subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as p:
        try:
            address = p.stdout.readline().strip()
            assert re.fullmatch(r'http://127\.0\.0\.1:\d+/\?token=[\w-]{20,}', address) and p.stdout.readline()==f'Follows fi* in {home}. End it with Ctrl-C.\n'
            with events(address) as said: assert [r['name'] for r in next(said)]==['fine']
            p.send_signal(signal.SIGINT)
            assert p.wait(20)==0 and not p.stderr.read()
        finally: p.kill()


def test_what_is_missing_is_named(monkeypatch, home):
    for name in 'uvicorn','starlette':
        with monkeypatch.context() as m:
            m.setitem(sys.modules, name, None)
            with pytest.raises(ImportError, match=f'The board needs {name}, which is not installed. Run: pip install starlette uvicorn'):
                board(home=home, port=0)


def test_a_port_that_is_taken_is_passed_over():
    with bind_socket('127.0.0.1', 0) as a:
        a.listen()
        port = a.getsockname()[1]
        with pytest.raises(OSError, match='Give another port'): bind_socket('127.0.0.1', port, 1)
        with bind_socket('127.0.0.1', port) as b: assert port<b.getsockname()[1]<port+50 and b.getsockname()[0]=='127.0.0.1'


# ---- runs that are too large to show completely

@pytest.mark.parametrize('parquet', [False, True])
def test_a_large_run_is_shown_by_some_of_its_steps(home, tmp_path, parquet):
    shutil.copytree(home, tmp_path/'home')
    if parquet: compact('broken', home=tmp_path/'home')
    there = Listing(tmp_path/'home')
    there.look()
    pages,whole = Pages(there),page_of(emberTracker('broken', home))
    pages.most,pages.most_later,pages.share = 150,300,0
    def made(): return json.loads(gzip.decompress(pages.of('broken')[0]))
    for n in 5,9:
        page = made()
        steps = page['kinds'][0]['step']
        # First and last step, and steps around the problem
        assert {0, 11, 12, 13, 17}<=set(steps) and len(steps)>=n and set(steps)<=set(range(18))
        assert page['trouble']==whole['trouble'] and page['run']['rows']==whole['run']['rows'] and page['run']['steps']==18
        assert f'{len(steps)} of 18 steps are shown' in page['run']['missing'] and [k['ttype'] for k in page['kinds']]==[k['ttype'] for k in whole['kinds']]
        assert page['numbers']==json.loads(json.dumps(whole['numbers'])) # The page has all logged numbers
        assert {t['label'] for t in page['kinds'][0]['tensors']}=={t['label'] for t in whole['kinds'][0]['tensors']}
    assert pages.of('broken')[1].endswith('+') and not page['more']
    last = pages.made['broken']
    # This page is final, so it is not computed again
    assert pages.of('broken')[1]==last[0] and pages.made['broken'] is last
    there.close()


def test_the_steps_of_processes_are_chosen_alike(home, tmp_path):
    for sub in 'log','data': (tmp_path/sub).mkdir()
    for rank in 0,1:
        (tmp_path/'log'/f'both.rank{rank}').write_bytes((home/'log'/'fine').read_bytes())
        (tmp_path/'data'/f'base_both.rank{rank}.json').write_bytes((home/'data'/'base_fine.json').read_bytes())
    run = run_of_steps(Home(tmp_path), 'both', [0, 7, 19], {'both.rank0': [], 'both.rank1': []})
    df = read(run)
    want = read(open_run('both', tmp_path), steps=[0, 7, 19])
    want = want[want.ttype!='scalar']
    assert df.step.tolist()==want.step.tolist() and sorted(set(df.step))==[0, 7, 19] and len(df)==len(want)


def test_of_many_numbers_some_are_kept(tmp_path):
    "If numbers are dropped, the first and last steps, findings, and spikes of one step are kept"
    w = FollowedLog('x', Home(tmp_path))
    w.kept = KeptLines(100)
    for s in range(1000):
        w.add({'step': s, 'ttype': 'scalar', 'x': 50. if s==333 else s/1000})
        if s==10: w.add({'step': s, 'ttype': 'finding', 'rule': 'r'})
    steps = [s for s,_ in w.kept.lines]
    assert len(steps)<100 and steps==sorted(steps) and {10, 333} <= {*steps} and steps[-1]>=984 and json.loads(w.kept.lines[0][1])['step']==steps[0]<40
    assert [s for s,line in w.kept.lines if b'finding' in line]==[10]
    w.close()


def test_a_picture_of_a_large_run_has_its_notable_steps(tmp_path):
    "A reduced picture keeps the first NaN, the first steps of open findings, their neighbours, and a spike of the loss"
    (tmp_path/'log').mkdir()
    def row(step, ttype, **more): return {'step': step, 'module': 'm(N).a(L)', 'ttype': ttype, 'tname': 'x', 'call': 0, **more}
    rows = [r for s in range(1000) for r in (row(s, 'output', std=1., nan=int(s>=900)), {**row(s, 'scalar'), 'loss': 40. if s==777 else 1.})]
    found = [row(s, 'finding', rule=rule, severity='error', text='It is bad.', first_step=first, **({'over': True} if over else {}))
        for s,rule,first,over in ((610, 'a', 600, False), (620, 'b', 400, False), (650, 'b', 400, True))]
    (tmp_path/'log'/'r').write_text(''.join(json.dumps(r)+'\n' for r in rows+found))
    listing = Listing(tmp_path)
    listing.look()
    log, = listing.logs_of('r')
    assert log.notable_steps==[599, 600, 601, 899, 900, 901]
    log.kept.most = 100
    for s in range(1000, 3000): log.kept.add(s, json.dumps({**row(s, 'scalar'), 'loss': 1.}).encode()+b'\n', {'loss': 1.})
    run,steps = listing.source(listing.rows[0], 40)
    df = read(run)
    assert {*log.notable_steps} <= {*steps} and len(steps)<=30 and {*df[df.ttype=='output'].step}=={*steps}
    assert df[df.loss==40.].step.tolist()==[777] and (df.ttype=='scalar').sum()<=100
    listing.close()


def test_notable_steps_of_all_ranks_are_in_a_picture(tmp_path):
    (tmp_path/'log').mkdir()
    def row(step, **more): return {'step': step, 'module': 'm(N).a(L)', 'ttype': 'output', 'tname': 'x', 'call': 0, 'std': 1., **more}
    for rank,bad in ((0, 400), (1, 700)):
        (tmp_path/'log'/f'r.rank{rank}').write_text(''.join(json.dumps(row(s, nan=int(s>=bad)))+'\n' for s in range(1000)))
    listing = Listing(tmp_path)
    listing.look()
    _,steps = listing.source(listing.rows[0], 40)
    assert {399, 400, 401, 699, 700, 701} <= {*steps} and len(steps)<40
    listing.close()
