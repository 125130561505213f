'use strict'
// Runs that are followed: the list comes as events, a run's page is fetched when it is chosen or has changed. Nothing is ever written.
const token = new URLSearchParams(location.search).get('token') ?? ''
const at = (path, more = {}) => `${path}?${new URLSearchParams({ ...more, token })}`
let runs = [], chosenRun = null, compared = [], shownVersion = null, fetching = false, others = new Map() // others: name -> [version, page]
const wait = { next: 0, took: 0 } // so that a large run does not keep the machine busy

function fromAddressOfBoard() {
  const asked = new URLSearchParams(location.hash.slice(1))
  chosenRun = asked.get('run') ?? chosenRun
  compared = asked.getAll('with')
}
alsoInAddress = now => {
  now.set('run', chosenRun)
  for (const name of compared) now.append('with', name)
  if (following()) now.set('step', 'last')
}
source = r => ` Served by torchember from its files: what you see is as new as these.`
const following = () => data && !data.trouble && kind() && state.step === steps()[steps().length - 1] // the newest step is looked at
const svg = (tag, some) => attrs(document.createElementNS('http://www.w3.org/2000/svg', tag), some)

function sparkOf(values) {
  if (values.length < 2) return ''
  const low = Math.min(...values), high = Math.max(...values), tall = high > low ? high - low : 1
  const points = values.map((v, i) => `${(120 * i / (values.length - 1)).toFixed(1)},${(21 - 20 * (v - low) / tall).toFixed(1)}`).join(' ')
  const e = svg('svg', { viewBox: '0 0 120 22', preserveAspectRatio: 'none', role: 'img', 'aria-label': `from ${few(values[0])} to ${few(values[values.length - 1])}` })
  e.append(svg('polyline', { points }))
  return e
}

const cell = (content, name = '') => make('td', { className: name }, ...[content].flat())
const rowsOf = new Map() // name -> [what it shows, element]: rows that have not changed stay as they are
function drawRuns() {
  $('#count').textContent = `(${runs.length}${runs.some(r => r.state === 'running') ? `, ${runs.filter(r => r.state === 'running').length} going on` : ''})`
  const names = new Set(runs.map(r => r.name))
  for (const name of rowsOf.keys()) if (!names.has(name)) rowsOf.delete(name)
  const all = runs.map(r => {
    const now = JSON.stringify([r, chosenRun === r.name, compared.includes(r.name)]), before = rowsOf.get(r.name)
    if (before?.[0] === now) return before[1]
    const box = make('input', { type: 'checkbox', checked: compared.includes(r.name), disabled: r.name === chosenRun })
    attrs(box, { 'aria-label': `Compare with ${r.name}` })
    box.onchange = () => { compared = box.checked ? [...compared, r.name] : compared.filter(n => n !== r.name); refresh() }
    const b = make('button', { type: 'button', textContent: r.name })
    b.onclick = () => pick(r.name)
    const row = make('tr', {}, cell(box), attrs(make('th', {}, b, ...(r.model ? [make('span', { className: 'why', textContent: ` ${r.model}${r.ranks > 1 ? `, ${r.ranks} processes` : ''}` })] : [])), { scope: 'row' }),
      cell(r.state === 'running' ? 'going on' : r.state, r.state), cell(whole(r.steps), 'number'), cell(r.loss ? `${r.loss[0]} ${r.loss[1] == null ? 'NaN' : few(r.loss[1])}` : '', 'what'), cell(sparkOf(r.spark)),
      cell([...(r.errors ? [make('span', { className: 'error', textContent: count(r.errors, 'error') + ' ' })] : []), ...(r.warnings ? [make('span', { className: 'warning', textContent: count(r.warnings, 'warning') + ' ' })] : []),
        ...(r.finding ?? r.problem ? [make('span', { textContent: r.finding ?? r.problem })] : [])], 'says'))
    row.onclick = e => { if (e.target !== box && e.target !== b) pick(r.name) }
    attrs(row, { 'aria-selected': r.name === chosenRun ? 'true' : null })
    rowsOf.set(r.name, [now, row])
    return row
  })
  const body = $('#runs tbody'), focused = document.activeElement?.closest('#runs tr'), which = focused && [...focused.querySelectorAll('button, input')].indexOf(document.activeElement)
  const name = focused && [...rowsOf].find(([, [, e]]) => e === focused || $('th button', e).textContent === $('th button', focused)?.textContent)?.[0]
  body.replaceChildren(...all)
  if (name && rowsOf.has(name)) rowsOf.get(name)[1].querySelectorAll('button, input')[which]?.focus()
}

async function pageOf(name) {
  const answer = await fetch(at('run', { name }))
  if (!answer.ok) throw new Error((await answer.json().catch(() => ({}))).problem ?? `The board answers ${answer.status}.`)
  return answer.json()
}
function say(text) { $('#link').textContent = text; $('#link').hidden = !text }

function pick(name) {
  if (name === chosenRun && data) return
  chosenRun = name
  compared = compared.filter(n => n !== name)
  shownVersion = null
  rowsOf.clear()
  drawRuns()
  refresh()
}

async function refresh() { // what is looked at is as new as the list
  const r = runs.find(r => r.name === chosenRun)
  if (!r || fetching) return
  const asked = compared.join('\n')
  const stale = compared.filter(n => others.get(n)?.[0] !== runs.find(r => r.name === n)?.version)
  if (shownVersion === r.version && !stale.length && refresh.asked === asked) return
  fetching = true
  try {
    const began = performance.now(), last = following()
    const page = shownVersion === r.version ? data : await pageOf(r.name)
    for (const n of compared) if (runs.some(r => r.name === n)) { if (stale.includes(n)) { const p = await pageOf(n); others.set(n, [p.version, p]) } } else others.delete(n)
    if (r.name !== chosenRun) return
    besides = compared.flatMap(n => others.has(n) && !others.get(n)[1].problem ? [others.get(n)[1]] : [])
    wait.took = performance.now() - began
    refresh.asked = asked
    const first = !data
    shownVersion = page.version
    if (page.problem) { document.body.classList.add('nothing'); say(page.problem); return }
    document.body.classList.remove('nothing')
    say('')
    if (!first && last && page !== data) { const now = new URLSearchParams(location.hash.slice(1)); now.set('step', 'last'); history.replaceState(null, '', '#' + now) }
    await show(page)
    document.title = `${page.run.name} · torchember`
    ready()
  } catch (e) {
    say(`${e.message}`)
  } finally {
    fetching = false
    drawRuns()
    setTimeout(refresh, Math.max(4 * wait.took, 1000)) // what has changed meanwhile
  }
}

function follow() {
  const heard = new EventSource(at('events'))
  heard.addEventListener('runs', e => {
    runs = JSON.parse(e.data)
    if (!runs.some(r => r.name === chosenRun) && !data) { if (chosenRun && runs.length) say(`There is no run ${chosenRun} here.`); chosenRun = runs[0]?.name ?? null }
    if (!runs.length) say('There are no runs here yet.')
    else if ($('#link').textContent.startsWith('There are no runs') || $('#link').textContent.startsWith('The board is away')) say('')
    drawRuns()
    refresh()
  })
  heard.onerror = () => say('The board is away. What you see is what there was; it is tried again.')
}
addEventListener('hashchange', () => { const before = chosenRun; fromAddressOfBoard(); if (chosenRun !== before) { shownVersion = null; rowsOf.clear(); drawRuns() } refresh() })
document.body.classList.add('nothing')
fromAddressOfBoard()
follow()
