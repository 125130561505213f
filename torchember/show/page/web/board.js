'use strict'
// Runs that are followed: the list comes as events, a run's page is fetched when it is chosen or has changed. Nothing is ever written.
const token = new URLSearchParams(location.search).get('token') ?? ''
const at = (path, more = {}) => `${path}?${new URLSearchParams({ ...more, token })}` // relative: the board may stand behind a proxy
let runs = [], chosenRun = null, compared = [], others = new Map() // others: name -> page
let onPage = { name: null, version: '', more: false, compared: '' } // what is on the page
let fetching = false, next = 0, pressed = false // next: when to look again, so that a large run does not keep the machine busy; pressed: nothing moves under a finger

// ---- what is looked at

const inAddress = () => new URLSearchParams(location.hash.slice(1))
function fromAddressOfBoard() {
  chosenRun = inAddress().get('run') ?? chosenRun
  compared = [...new Set(inAddress().getAll('with'))].filter(n => n !== chosenRun)
}
alsoInAddress = now => {
  now.set('run', data.run.name)
  for (const name of compared) now.append('with', name)
  if (following()) now.set('step', 'last')
  if (state.words) now.set('search', state.words)
  if (zoom) now.set('zoom', `${zoom.min},${zoom.max}`)
  if (which) now.set('number', data.numbers[which].name)
  if (state.sort != null) now.set('sort', `${state.sort},${state.down}`)
  filterFindings()
}
alsoFromAddress = asked => {
  state.words = asked.get('search') ?? ''
  if ($('#search').value.trim() !== state.words) $('#search').value = state.words
  const [low, high] = (asked.get('zoom') ?? '').split(',').map(parseFloat)
  zoom = low < high ? { min: low, max: high } : null
  whichName = asked.get('number') ?? whichName
  const [column, down] = (asked.get('sort') ?? '').split(',')
  state.sort = Object.hasOwn(tableColumns, column) ? +column : null
  state.down = down !== 'false'
}
addressIsOurs = () => (inAddress().get('run') ?? data.run.name) === data.run.name
phasesToo = followsPointer = true
zoomed = () => { if (onPage.name === data.run.name) toAddress() }
$('#layers thead').addEventListener('click', () => toAddress())
goingOn = 'going on'
source = () => ' Served by torchember from its files: what you see is as new as these.'
const following = () => data && kind() && state.step === steps()[steps().length - 1] // the newest step is looked at
function filterFindings() { for (const li of $('#health').querySelectorAll('li')) li.hidden = !found(li.textContent) }

// ---- the list of runs

const svg = (tag, some) => attrs(document.createElementNS('http://www.w3.org/2000/svg', tag), some)
function sparkOf(values) {
  if (values.length < 2) return ''
  const low = Math.min(...values), high = Math.max(...values), tall = high > low ? high - low : 1
  const points = values.map((v, i) => `${(120 * i / (values.length - 1)).toFixed(1)},${(21 - 20 * (v - low) / tall).toFixed(1)}`).join(' ')
  const e = svg('svg', { viewBox: '0 0 120 22', preserveAspectRatio: 'none', role: 'img', 'aria-label': `from ${few(values[0])} to ${few(values[values.length - 1])}` })
  e.append(svg('polyline', { points }))
  return e
}

const states = { running: 'going on', ended: 'ended', died: 'died', silent: 'silent' }
const cell = (content, name = '') => make('td', { className: name }, ...[content].flat())
const said = (n, one) => n ? [make('span', { className: one, textContent: count(n, one) + ' ' })] : []
function rowOf(r) {
  const box = attrs(make('input', { type: 'checkbox', checked: compared.includes(r.name), disabled: r.name === chosenRun }), { 'aria-label': `Compare with ${r.name}` })
  box.onchange = () => { compared = box.checked ? [...compared, r.name] : compared.filter(n => n !== r.name); refresh(true) }
  const b = make('button', { type: 'button', textContent: r.name }), what = r.model ? ` ${r.model}${r.ranks > 1 ? `, ${r.ranks} processes` : ''}` : ''
  b.onclick = () => pick(r.name)
  const row = make('tr', {}, cell(box), attrs(make('th', {}, b, make('span', { className: 'why', textContent: what })), { scope: 'row' }),
    cell(states[r.state] ?? r.state, states[r.state] ? r.state : ''), cell(whole(r.steps), 'number'),
    cell(r.loss ? [`${r.loss[0]} `, r.loss[1] == null ? make('span', { className: 'error', textContent: 'NaN' }) : few(r.loss[1])] : '', 'what'), cell(sparkOf(r.spark), 'curve'),
    cell([...said(r.errors, 'error'), ...said(r.warnings, 'warning'), ...(r.finding ?? r.problem ? [make('span', { textContent: r.finding ?? r.problem })] : [])], 'says'))
  row.onclick = e => { if (e.target !== b && !e.target.closest('td:first-child')) pick(r.name) }
  return attrs(row, { 'aria-selected': r.name === chosenRun ? 'true' : null })
}
const rowsOf = new Map() // name -> [what it shows, element]: rows that have not changed stay as they are
function drawRuns() {
  const going = runs.filter(r => r.state === 'running').length
  $('#count').textContent = `(${runs.length}${going ? `, ${going} going on` : ''})`
  const focus = document.activeElement, inRow = focus?.closest('#runs tbody tr'), which = inRow && [...inRow.querySelectorAll('button, input')].indexOf(focus)
  const name = inRow && [...rowsOf].find(([, [, e]]) => e === inRow)?.[0]
  const now = runs.map(r => [r.name, JSON.stringify([r, chosenRun === r.name, compared.includes(r.name)]), r])
  const all = now.map(([n, text, r]) => { if (rowsOf.get(n)?.[0] !== text) rowsOf.set(n, [text, rowOf(r)]); return rowsOf.get(n)[1] })
  for (const n of [...rowsOf.keys()]) if (!runs.some(r => r.name === n)) rowsOf.delete(n)
  const body = $('#runs tbody')
  if (all.length === body.children.length && all.every((e, i) => e === body.children[i])) return
  body.replaceChildren(...all)
  if (name != null && rowsOf.has(name)) rowsOf.get(name)[1].querySelectorAll('button, input')[which]?.focus()
}
$('#runs tbody').addEventListener('keydown', e => {
  const rows = [...$('#runs tbody').children], to = { ArrowDown: 1, ArrowUp: -1 }[e.key], kindOf = e.target.tagName === 'INPUT' ? 'input' : 'button'
  if (!to) return
  e.preventDefault()
  $(kindOf, rows[Math.min(Math.max(rows.indexOf(e.target.closest('tr')) + to, 0), rows.length - 1)])?.focus()
})

// ---- a run

function say(text) { $('#link').textContent = text; $('#link').hidden = !text }
async function pageOf(name, have) { // null: there is nothing newer
  const answer = await fetch(at('run', { name, ...(have == null ? {} : { have }) }))
  if (answer.status === 204) return null
  if (!answer.ok) throw new Error((await answer.json().catch(() => ({}))).problem ?? `The board answers ${answer.status}.`)
  return answer.json()
}

function pick(name) {
  if (name === chosenRun && data) return
  chosenRun = name
  compared = compared.filter(n => n !== name)
  const now = inAddress()
  for (const k of ['step', 'zoom', 'with']) now.delete(k)
  now.set('run', name)
  for (const n of compared) now.append('with', n)
  history.pushState(null, '', '#' + now)
  drawRuns()
  refresh(true)
}

const versionOf = name => runs.find(r => r.name === name)?.version
async function refresh(now = false) { // what is looked at is as new as the list
  if (now) next = 0
  const name = chosenRun, r = runs.find(r => r.name === name), beside = JSON.stringify(compared)
  if (!r || fetching || pressed || document.hidden || performance.now() < next) return
  const stale = compared.filter(n => versionOf(n) != null && others.get(n)?.version.replace('+', '') !== versionOf(n)), newer = onPage.name !== name || onPage.more || onPage.version.replace('+', '') !== r.version
  if (!newer && !stale.length && onPage.compared === beside) return
  fetching = true
  try {
    for (const n of stale) { const p = await pageOf(n, others.get(n)?.version); if (p) others.set(n, p) }
    for (const n of [...others.keys()]) if (!compared.includes(n)) others.delete(n)
    const page = newer ? await pageOf(name, onPage.name === name ? onPage.version : null) : null
    if (name !== chosenRun) return
    const drawing = performance.now()
    if (page || stale.length || onPage.compared !== beside) await put(page, name, beside)
    next = performance.now() + Math.max(4 * (performance.now() - drawing), 900)
  } catch (e) {
    next = performance.now() + 3000
    if (name === chosenRun) say(e.message)
  } finally {
    fetching = false
    drawRuns()
    setTimeout(refresh, name !== chosenRun ? 0 : Math.max(next - performance.now(), 0) + 50) // what has changed meanwhile
  }
}
async function put(page, name, beside) {
  const fresh = onPage.name !== name
  onPage = { name, version: page ? page.version : onPage.version, more: page ? page.more : onPage.more, compared: beside } // more: there will be one with more steps
  document.body.classList.toggle('nothing', !!(page ?? data)?.problem)
  say(page?.problem ?? '')
  if (page?.problem) return
  besides = compared.flatMap(n => others.has(n) && !others.get(n).problem ? [others.get(n)] : [])
  if (!fresh && data) toAddress() // what was chosen a moment ago is kept, and the last step is the new last one
  const [id, u] = Object.entries(charts).find(([, u]) => u === under) ?? [], pointer = u && u.cursor.left >= 0 ? { left: u.cursor.left, top: u.cursor.top } : null
  await show(page ?? data)
  if (pointer && charts[id]) { under = charts[id]; charts[id].setCursor(pointer) } // it has not moved
  document.title = `${name} · torchember`
  ready()
}

function follow() {
  const heard = new EventSource(at('events'))
  heard.onopen = () => { if ($('#link').textContent === away) say('') }
  heard.addEventListener('runs', e => {
    runs = JSON.parse(e.data)
    if (!runs.length) say(nothing)
    else if ($('#link').textContent === nothing) say('')
    if (!runs.some(r => r.name === chosenRun) && !data) {
      if (chosenRun != null && runs.length) say(`There is no run ${chosenRun} here.`)
      else chosenRun = runs[0]?.name ?? null
    }
    drawRuns()
    refresh()
  })
  heard.onerror = () => {
    say(away)
    if (heard.readyState === EventSource.CLOSED) { heard.close(); setTimeout(follow, 3000) }
  }
}
const nothing = 'There are no runs here yet.', away = 'The board is away, or was started anew with another token. What you see is what there was; it is tried again.'
addEventListener('hashchange', () => {
  const before = chosenRun
  fromAddressOfBoard()
  drawRuns()
  refresh(chosenRun !== before || onPage.compared !== JSON.stringify(compared))
})
addEventListener('pointerdown', () => { pressed = true })
for (const over of ['pointerup', 'pointercancel', 'blur']) addEventListener(over, () => { pressed = false; setTimeout(refresh, 300) })
document.addEventListener('visibilitychange', () => refresh())
document.body.classList.add('nothing')
fromAddressOfBoard()
follow()
