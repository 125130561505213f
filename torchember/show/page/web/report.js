'use strict'
// A run, to look at and to point into. All that is shown is in `data`, as torchember.show.page.data makes it; names of layers
// are somebody's data, so text goes into the page as text, never as HTML. In a report it lies in the page, and a board hands it to `show`.
let data = null
const $ = (css, within = document) => within.querySelector(css)
const make = (tag, props = {}, ...children) => { const e = Object.assign(document.createElement(tag), props); e.append(...children); return e }
const attrs = (e, some) => { for (const [k, v] of Object.entries(some)) v == null ? e.removeAttribute(k) : e.setAttribute(k, v); return e }
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim()
const few = v => !Number.isFinite(v) ? (v === v ? (v > 0 ? '∞' : '−∞') : '') :
  v === 0 ? '0' : Math.abs(v) >= 1e5 || Math.abs(v) < 1e-3 ? v.toExponential(2).replace('e+', 'e') : String(+v.toPrecision(4))
const whole = n => n == null ? '' : Math.round(n).toLocaleString('en')
const raised = n => '2' + String(n).replace(/./g, c => c === '-' ? '⁻' : '⁰¹²³⁴⁵⁶⁷⁸⁹'[c])
const percent = v => `${100 * v >= 100 ? whole(100 * v) : +(100 * v).toPrecision(v < .1 ? 2 : 3)} %`
const count = (n, one) => `${whole(n)} ${one}${n === 1 ? '' : 's'}`

// ---- the current selection; also in the address, to share it

let kinds = new Map()
const state = { kind: null, stat: null, path: null, label: null, step: 0, words: '', sort: null, down: true }
const kind = () => kinds.get(state.kind)

// What a board has besides: runs to compare with, other phases of a number in its chart, a step under the pointer that all charts show, more in the address
let besides = [], phasesToo = false, followsPointer = false, pointed = null, alsoInAddress = () => {}, alsoFromAddress = () => {}, addressIsOurs = () => true, zoomed = () => {}
const here = () => pointed ?? state.step // the step that is shown

function fromAddress() {
  const asked = new URLSearchParams(location.hash.slice(1))
  state.kind = kinds.has(asked.get('tensors')) ? asked.get('tensors') : kinds.has('output') ? 'output' : data.kinds[0]?.ttype ?? null
  const stats = kind() ? Object.keys(kind().stats) : []
  state.stat = stats.includes(asked.get('stat')) ? asked.get('stat') : stats[0] ?? null
  const step = parseInt(asked.get('step'), 10)
  state.step = nearest(steps(), asked.get('step') === 'last' ? Number.MAX_SAFE_INTEGER : Number.isFinite(step) ? step : data.trouble ? data.trouble.step : Number.MAX_SAFE_INTEGER)
  const at = asked.get('at')
  const tensor = kind()?.tensors.find(t => t.label === at)
  state.label = tensor ? at : null
  state.path = tensor ? tensor.path : data.tree.some(m => m[0] === at) && at ? at : null
  alsoFromAddress(asked)
}

function toAddress() {
  const now = new URLSearchParams({ tensors: state.kind ?? '', stat: state.stat ?? '', step: state.step })
  if (state.label ?? state.path) now.set('at', state.label ?? state.path)
  alsoInAddress(now)
  history.replaceState(null, '', '#' + now)
}

const steps = () => kind()?.step ?? []
function nearest(list, x) {
  let low = 0, high = list.length - 1
  while (low < high) { const m = (low + high) >> 1; if (list[m] < x) low = m + 1; else high = m }
  return low > 0 && Math.abs(list[low - 1] - x) <= Math.abs(list[low] - x) ? list[low - 1] : list[low] ?? 0
}
const column = (list, x) => Math.max(list.indexOf(nearest(list, x)), 0)

// ---- numbers: float32, in planes of bytes, compressed

const unpackedAlready = new WeakMap()
function numbers(packed) {
  if (!unpackedAlready.has(packed)) unpackedAlready.set(packed, unpack(packed))
  return unpackedAlready.get(packed)
}
async function unpack(packed) {
  const text = atob(packed.zip), raw = new Uint8Array(text.length)
  for (let i = 0; i < text.length; i++) raw[i] = text.charCodeAt(i)
  const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream('gzip'))
  const planes = new Uint8Array(await new Response(stream).arrayBuffer()), n = planes.length / 4, bytes = new Uint8Array(4 * n)
  for (let k = 0; k < 4; k++) for (let i = 0; i < n; i++) bytes[4 * i + k] = planes[k * n + i]
  return new Float32Array(bytes.buffer)
}

const stepsOf = (k, j) => { // the steps that share a column
  const to = k.thin ? (k.step[j + 1] ?? k.last + 1) - 1 : k.step[j]
  return to > k.step[j] ? `one of steps ${whole(k.step[j])} to ${whole(to)}` : `step ${whole(k.step[j])}`
}
async function view() { // what is drawn: a matrix, with what is not finite
  const k = kind(), columns = k.step.length, stat = state.stat // which may be another one when the numbers are there
  k.wrongSet ??= new Set(k.wrong)
  return { k, columns, rows: k.tensors.length, value: await numbers(k.stats[stat]), wrong: (i, j) => k.wrongSet.has(i * columns + j), name: data.meanings[stat], stat }
}

// ---- how a value becomes a colour

function scaleOf(value) {
  let low = Infinity, high = -Infinity, above = Infinity, zeros = false
  for (const v of value) if (Number.isFinite(v)) { if (v < low) low = v; if (v > high) high = v; if (v > 0 && v < above) above = v; if (v === 0) zeros = true }
  if (low > high) return { at: () => 0, low: 0, high: 1, log: false, zeros: false }
  zeros = zeros && low >= 0 && high > 0
  const log = low >= 0 && high > 0 && high > 30 * above
  if (log) { low = Math.max(above, high * 1e-12) } else if (zeros) low = above
  const range = log ? Math.log(high / low) : high - low
  return { low, high, log, zeros, at: v => range > 0 ? Math.min(Math.max(log ? Math.log(v / low) / range : (v - low) / range, 0), 1) : 0 }
}
const bytesOf = c => [1, 3, 5].map(i => parseInt(c.slice(i, i + 2), 16))
let ramp = [], gray = []
const isDark = () => document.documentElement.dataset.theme === 'dark'
const palette = () => data.colors[isDark() ? 'dark' : 'light'].lines
function colorOf(scale, v) {
  if (!Number.isFinite(v)) return null
  if (scale.zeros && v === 0) return gray
  return ramp[Math.min(Math.floor(scale.at(v) * ramp.length), ramp.length - 1)]
}

// ---- selection

const textOf = t => [t.label, typeOf.get(t.path) ?? '', t.why ?? ''].join(' ')
const found = text => state.words.toLowerCase().split(/\s+/).every(w => text.toLowerCase().includes(w))
const listed = k => k.tensors.map((_, i) => i).filter(i => found(textOf(k.tensors[i]))) // which tensors the search leaves

const chosen = t => state.label != null ? t.label === state.label :
  state.path != null && (t.path === state.path || t.path.startsWith(state.path + '.'))
const anything = () => state.label != null || state.path != null
function shown(k = kind()) { // the tensor whose sizes are drawn
  const all = k?.tensors ?? []
  return all.find(t => t.label === state.label) ?? all.find(t => t.path === state.path) ?? all.find(chosen) ?? listed(k ?? { tensors: [] }).map(i => all[i]).find(t => !t.why) ?? all[0]
}
function choose({ label = null, path = null, step = null }) {
  state.label = label
  state.path = label != null ? kind().tensors.find(t => t.label === label)?.path ?? null : path
  if (step != null) state.step = nearest(steps(), step)
  reveal()
  changed('choice')
}

// ---- charts over the steps share their pointer, their zoom and the line at the chosen step

const charts = {}
let zoom = null, zooming = false, before = {} // the last click, which may turn out to be the first half of two
const together = uPlot.sync('steps')
const phone = () => innerWidth < 760

function chart(id, options, values, height) {
  const box = $(`#${id} .chart`)
  charts[id]?.destroy()
  const font = '12px system-ui, sans-serif'
  const axis = { stroke: css('--soft'), font, labelFont: font, grid: { stroke: css('--line'), width: .5 }, ticks: { stroke: css('--line'), width: .5, size: 4 } }
  const all = { width: Math.max(box.clientWidth, 200), height, pxAlign: 0, legend: { show: false }, ...options,
    axes: options.axes.map(a => ({ ...axis, ...a })) }
  charts[id] = new uPlot(all, values, box)
  charts[id].tall = height
  return charts[id]
}

function overSteps(more = {}) { // what all charts over the steps have
  return {
    scales: { x: { time: false, range: (u, low, high) => u.settled && low < high ? [low, high] : zoom ? [zoom.min, zoom.max] : allSteps() }, ...more.scales },
    cursor: { drag: { x: true, y: false, dist: 6 }, focus: { prox: 30 }, points: { show: false }, ...more.cursor,
      sync: { key: together.key, scales: ['x', null], filters: { pub: t => t === 'mousemove' || t === 'mouseleave', sub: t => t === 'mousemove' || t === 'mouseleave' } } },
    hooks: {
      ...more.hooks,
      ready: [u => {
        u.settled = true
        let from = null
        u.root.addEventListener('mousemove', () => { under = u }, true)
        u.over.addEventListener('mousedown', e => { from = e.clientX })
        u.over.addEventListener('click', e => {
          if (e.detail > 1) return
          before = { label: state.label, path: state.path, step: state.step }
          if (from == null || Math.abs(e.clientX - from) < 6) more.click?.(u, u.posToVal(e.offsetX, 'x'), e.offsetX, e.offsetY)
        })
        u.over.addEventListener('dblclick', () => { zoomTo(null); Object.assign(state, before); changed('choice') }) // its first click was no choice
      }, ...(more.hooks?.ready ?? [])],
      setScale: [(u, key) => { if (key === 'x' && !zooming && u.status) zoomTo({ min: u.scales.x.min, max: u.scales.x.max }, u) }],
      setCursor: [pointAt, ...(more.hooks?.setCursor ?? [])],
      draw: [...(more.hooks?.draw ?? []), markStep]
    }
  }
}

let under = null, pointing = 0 // the chart that has the pointer
const passedOn = u => followsPointer && under !== u && u.cursor.left >= 0 // another chart has the pointer
function pointAt(u) {
  if (!followsPointer) return
  const step = u.cursor.left >= 0 ? nearest(steps(), u.posToVal(u.cursor.left, 'x')) : null
  if (step === pointed) return
  pointed = step
  $('#stepout').textContent = steps().length ? whole(here()) : '–'
  pointing ||= requestAnimationFrame(() => { pointing = 0; drawing = drawing.then(() => Promise.all([drawSizes(), drawHeads(), colorTree()])).catch(e => console.error(e)) })
}

function zoomTo(range, from) {
  zooming = true
  const full = allSteps()
  const near = (full[1] - full[0]) / 200 // charts begin and end where their numbers do
  zoom = range && (range.min > full[0] + near || range.max < full[1] - near) ? range : null
  range = zoom
  for (const id of ['numbers', 'heat', 'lines']) if (charts[id] && (charts[id] !== from || !zoom)) charts[id].setScale('x', range ?? { min: full[0], max: full[1] })
  zooming = false
  zoomed()
}

function allSteps() {
  const ends = [data, ...besides].flatMap(p => [...p.kinds.map(k => k.step), ...p.numbers.map(n => n.step)]).filter(s => s.length)
  const low = Math.min(...ends.map(s => s[0])), high = Math.max(...ends.map(s => s[s.length - 1]))
  return low < high ? [low, high] : [low - .5, high + .5]
}

function line(u, x, color, dash, width = 1) {
  const at = u.valToPos(x, 'x', true), { ctx, bbox } = u
  if (!(at >= bbox.left - 1 && at <= bbox.left + bbox.width + 1)) return
  ctx.save()
  ctx.strokeStyle = color; ctx.lineWidth = width * devicePixelRatio; ctx.setLineDash(dash.map(d => d * devicePixelRatio))
  ctx.beginPath(); ctx.moveTo(at, bbox.top); ctx.lineTo(at, bbox.top + bbox.height); ctx.stroke()
  ctx.restore()
}
function markStep(u) {
  if (data.trouble) line(u, data.trouble.step, css('--bad'), [5, 4])
  line(u, state.step, css('--mark'), [], 1.5)
}
function crosses(u, xs, color) { // along the upper edge, where something was not finite
  const { ctx, bbox } = u, r = 3.5 * devicePixelRatio
  ctx.save()
  ctx.strokeStyle = color; ctx.lineWidth = 1.5 * devicePixelRatio
  ctx.beginPath()
  let last = -Infinity
  for (const x of xs) {
    const at = u.valToPos(x, 'x', true)
    if (at < bbox.left - 1 || at > bbox.left + bbox.width + 1 || at - last < r) continue
    last = at
    ctx.moveTo(at - r, bbox.top - r); ctx.lineTo(at + r, bbox.top + r); ctx.moveTo(at - r, bbox.top + r); ctx.lineTo(at + r, bbox.top - r)
  }
  ctx.stroke()
  ctx.restore()
}
const wide = values => { // whether an axis is better logarithmic
  let low = Infinity, high = -Infinity
  for (const v of values) if (Number.isFinite(v)) { if (v < 0) return false; if (v > 0) { if (v < low) low = v; if (v > high) high = v } }
  return high > 100 * low
}
// A logarithmic axis is one of exponents of ten: so it also has room for what is smaller or larger than a chart's own can count to
const heightOf = (v, log) => Number.isFinite(v) && (!log || v > 0) ? log ? Math.log10(v) : v : null
const yAxis = (log, size) => ({ size, values: (u, ticks) => ticks.map(v => v == null ? '' : few(log ? 10 ** v : v).replace('.00e', 'e')), ...(log ? { incrs: [.30103, 1, 2, 3, 5, 10, 20, 50, 100] } : {}) })
const xAxis = { size: 26, values: (u, ticks) => ticks.map(v => Number.isInteger(v) ? whole(v) : '') }

// ---- the number that was noted: the loss

let which = 0, whichName = null
async function drawNumbers() {
  const section = $('#numbers')
  section.hidden = !data.numbers.length
  if (section.hidden) return
  const n = data.numbers[which], y = await numbers(n.value), odd = n.step.filter((_, i) => !Number.isFinite(y[i]))
  const others = []
  for (const [m, run] of related(n)) others.push({ name: run ? `${m.name} of ${run}` : m.name, step: m.step, y: await numbers(m.value), aside: run })
  const log = wide([y, ...others.map(o => o.y)].flatMap(v => Array.from(v))), all = [{ name: n.name, step: n.step, y }, ...others]
  const [steps, ...lines] = uPlot.join(all.map(o => [o.step, Array.from(o.y, v => heightOf(v, log))])), colors = palette()
  const at = all.map(o => new Map(o.step.map((s, i) => [s, i])))
  const read = u => {
    const i = u.cursor.idx, step = steps[i]
    $('.readout', section).textContent = i == null || i < 0 ? others.length ? all.map(o => `${o.name}: ${summaryOf(o, o.y)}`).join('; ') : summaryOf(n, y) :
      `step ${whole(step)}: ${all.flatMap((o, k) => at[k].has(step) ? [`${o.name} ${few(o.y[at[k].get(step)]) || 'NaN'}`] : []).join(', ')}`
  }
  chart('numbers', { ...overSteps({ click: (u, x) => choose({ label: state.label, path: state.path, step: x }),
    hooks: { setCursor: [read], draw: [u => crosses(u, odd, css('--bad'))] } }),
    series: [{}, ...all.map((o, k) => ({ stroke: colors[k % colors.length], width: 1.5, spanGaps: false, dash: o.aside ? [6, 3] : [], points: { show: o.step.length < 3 } }))],
    axes: [xAxis, yAxis(log, labelRoom())] }, [steps, ...lines], 150)
  section.dataset.lines = all.length
  attrs($('.chart', section), { 'aria-label': `Line chart of ${n.name} over the steps. ${summaryOf(n, y)}` })
  read(charts.numbers)
}
const stemOf = name => name.toLowerCase().split(/[_/.-]/).filter(w => !['train', 'training', 'val', 'valid', 'validation', 'eval', 'test'].includes(w)).join('_')
function related(n) { // the same of other phases, and of other runs
  const same = some => some.filter(m => m.name === n.name), phases = data.numbers.filter(m => phasesToo && m !== n && stemOf(m.name) === stemOf(n.name))
  return [...phases.map(m => [m, '']), ...besides.flatMap(p => same(p.numbers ?? []).map(m => [m, p.run.name]))]
}
function summaryOf(n, y) {
  const ok = Array.from(y).filter(Number.isFinite)
  if (!ok.length) return `${n.name} was never finite.`
  const odd = y.length - ok.length
  return `first ${few(ok[0])}, last ${few(ok[ok.length - 1])}, lowest ${few(ok.reduce((a, b) => Math.min(a, b)))}${odd ? `; not finite ${count(odd, 'time')}` : ''}`
}
const widest = 26 // letters
const labelRoom = () => phone() ? 52 : Math.max(60, 16 + 6.8 * longest(shortened(kind()?.tensors.map(t => t.label) ?? [], widest)))
const longest = names => names.reduce((n, s) => Math.max(n, s.length), 0)

// ---- all layers and steps

async function drawHeat() {
  const section = $('#heat'), list = kind() ? listed(kind()) : []
  section.hidden = !list.length
  if (section.hidden) return
  const v = await view(), { k, columns, value } = v, rows = list.length, scale = scaleFor(v)
  const image = make('canvas', { width: columns, height: rows }), pixels = new ImageData(columns, rows), bad = [], place = new Map(list.map((i, r) => [i, r]))
  list.forEach((i, r) => {
    for (let j = 0; j < columns; j++) {
      const c = colorOf(scale, value[i * columns + j])
      if (c) pixels.data.set([c[0], c[1], c[2], 255], 4 * (r * columns + j))
    }
  })
  image.getContext('2d').putImageData(pixels, 0, 0)
  for (const at of k.wrong) if (place.has(Math.floor(at / columns))) bad.push([place.get(Math.floor(at / columns)), at % columns])
  const ends = columnEnds(k), reasons = reasonsIn(list.map(i => k.tensors[i].why), r => k.n[v.stat][list[r]] > 0)
  const height = Math.min(Math.max(rows * 15 + 40, 90), phone() ? 420 : 620)
  const names = shortened(k.tensors.map(t => t.label), widest)
  const paint = u => {
    const { ctx, bbox } = u, tall = bbox.height / rows
    ctx.save()
    ctx.beginPath(); ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height); ctx.clip()
    ctx.imageSmoothingEnabled = tall < 1
    ctx.fillStyle = 'rgba(128, 128, 128, .15)' // nothing was recorded there
    ctx.fillRect(bbox.left, bbox.top, bbox.width, bbox.height)
    const x = ends.map(e => e.map(v => u.valToPos(v, 'x', true)))
    for (let j = 0; j < columns; j++) if (x[j][1] > bbox.left && x[j][0] < bbox.left + bbox.width)
      ctx.drawImage(image, j, 0, 1, rows, Math.floor(x[j][0]), bbox.top, Math.max(Math.ceil(x[j][1]) - Math.floor(x[j][0]), devicePixelRatio), bbox.height)
    ctx.fillStyle = css('--bad')
    for (const [i, j] of bad) ctx.fillRect(Math.floor(x[j][0]), bbox.top + i * tall, Math.max(Math.ceil(x[j][1]) - Math.floor(x[j][0]), 2), Math.max(tall, 2))
    writeReasons(ctx, bbox, tall, reasons)
    const flags = anything() ? list.map(i => !chosen(k.tensors[i])) : []
    if (flags.includes(false)) { // what is not chosen pales
      ctx.globalAlpha = .6
      ctx.fillStyle = css('--back')
      for (const [from, to] of spans(flags)) ctx.fillRect(bbox.left, bbox.top + from * tall, bbox.width, (to - from) * tall)
    }
    ctx.restore()
  }
  const rowAt = (u, y) => Math.min(Math.max(Math.floor(u.posToVal(y, 'y')), 0), rows - 1)
  const read = u => {
    const { left, top } = u.cursor
    const over = left >= 0 && top >= 0
    const i = over && !passedOn(u) ? list[rowAt(u, top)] : Math.max(k.tensors.indexOf(shown(k)), 0), j = over ? column(k.step, u.posToVal(left, 'x')) : column(k.step, state.step)
    const number = few(value[i * columns + j]), wrong = v.wrong(i, j) ? 'not finite' : '', why = k.tensors[i].why
    $('.readout', section).textContent = `${k.tensors[i].label}, ${stepsOf(k, j)}: ${[...(number || wrong || !why ? [`${v.name} ${[number, wrong].filter(Boolean).join(', ') || 'not recorded'}`] : []), ...(why ? [why] : [])].join(', ')}`
  }
  const every = Math.max(1, Math.ceil(rows * 13 / (height - 40)))
  chart('heat', { ...overSteps({
    scales: { y: { range: () => [0, rows], dir: -1 } },
    click: (u, x, left, top) => choose({ label: k.tensors[list[rowAt(u, top)]].label, step: x }),
    hooks: { draw: [paint], setCursor: [read] } }),
    series: [{}, { paths: () => null, points: { show: false } }],
    axes: [xAxis, { size: labelRoom(), grid: { show: false }, ticks: { show: false }, splits: () => list.map((_, r) => r + .5).filter((_, r) => r % every === 0),
      values: (u, at) => at.map(y => phone() ? elided(names[list[Math.floor(y)]], 7) : names[list[Math.floor(y)]]) }]
  }, [k.step, k.step.map(() => null)], height)
  $('h2', section).textContent = `${capital(k.name)}: ${v.name} of all layers`
  attrs($('.chart', section), { 'aria-label': `Heat map of ${v.name}, ${count(rows, 'tensor')} down, ${count(columns, 'step')} across. Arrow keys move the choice.` })
  const bar = make('span', { className: 'ramp' })
  bar.style.background = `linear-gradient(to right, ${data.colors.scale.filter((_, i) => i % 7 === 0).join()})`
  const keys = [make('span', { textContent: few(scale.low) }), bar, make('span', { textContent: few(scale.high) + (scale.log ? ', logarithmic' : '') })]
  const key = (color, text) => { const e = make('span', { className: 'key' }); e.style.background = color; keys.push(e, make('span', { textContent: text })) }
  if (scale.zeros) key(data.colors.zero, 'exactly zero')
  if (bad.length) key(css('--bad'), 'not finite')
  $('.scale', section).replaceChildren(...keys)
  read(charts.heat)
}
async function drawHeads() { // attention: a row for each layer, a column for each head, at the step that is shown
  const section = $('#heads'), h = kind()?.heads
  section.hidden = !h
  if (!h) return
  const v = await view(), scale = scaleFor(v), j = column(v.k.step, here()), across = Math.max(...h.at.map(a => a[1])) + 1, names = shortened(h.layers, widest)
  const rows = h.layers.map((_, r) => Array.from({ length: across }, () => make('td')))
  h.at.forEach(([layer, head], i) => {
    const cell = rows[layer][head], value = v.value[i * v.columns + j], c = colorOf(scale, value), t = v.k.tensors[i]
    cell.style.background = v.wrong(i, j) ? css('--bad') : c ? `rgb(${c})` : 'transparent'
    cell.title = `${t.label}: ${few(value) || (v.wrong(i, j) ? 'not finite' : 'not recorded')}`
    attrs(cell, { 'aria-selected': String(anything() && chosen(t)) })
    cell.onclick = () => choose(state.label === t.label ? {} : { label: t.label })
  })
  const every = Math.ceil(across / 32)
  $('h2', section).textContent = `${capital(v.name)} of each head, ${stepsOf(v.k, j)}`
  $('.heads', section).replaceChildren(make('tbody', {}, ...rows.map((cells, r) => make('tr', {}, make('th', { textContent: names[r], title: h.layers[r] }), ...cells))),
    make('tfoot', {}, make('tr', {}, make('th', { textContent: 'head' }), ...rows[0].map((_, i) => make('td', { textContent: i % every ? '' : String(i) })))))
}
function columnEnds(k) { // where each column begins and ends: a step that is far from its neighbours is a mark, as nothing was recorded between
  const s = k.step, n = s.length, gaps = s.slice(1).map((v, j) => v - s[j]), least = Math.min(...gaps.map(g => g || 1), n > 1 ? Infinity : 1)
  const half = Math.max(least, n > 2 ? (s[n - 1] - s[0]) / 400 : 0) / 2, hole = g => n > 2 && !k.thin && g > Math.max(2.5 * least, 2 * half)
  const reach = g => hole(g) ? Math.min(half, g / 2) : g / 2
  return s.map((v, j) => [v - reach(gaps[j - 1] ?? gaps[0] ?? 1), v + reach(gaps[j] ?? gaps[n - 2] ?? 1)])
}
function reasonsIn(why, known) { // [reason, first row, row after the last, whether there are values], one for neighbours that share it
  const out = []
  why.forEach((w, r) => { const last = out[out.length - 1]; if (last && last[0] === w && last[2] === r && last[3] === known(r)) last[2]++; else if (w) out.push([w, r, r + 1, known(r)]) })
  return out
}
function writeReasons(ctx, bbox, tall, reasons) {
  const size = 11 * devicePixelRatio
  let low = -Infinity
  ctx.font = `${size}px system-ui, sans-serif`
  ctx.textBaseline = 'middle'; ctx.lineWidth = 3 * devicePixelRatio; ctx.strokeStyle = css('--back'); ctx.fillStyle = css('--ink')
  for (const [text, from, to, aside] of reasons) {
    const y = bbox.top + (from + to) / 2 * tall
    if (y - low < size) continue // it would lie over the one before
    low = y
    ctx.textAlign = aside ? 'right' : 'center'
    const x = aside ? bbox.left + bbox.width - 4 * devicePixelRatio : bbox.left + bbox.width / 2
    ctx.strokeText(text, x, y)
    ctx.fillText(text, x, y)
  }
}
function spans(flags) {
  const out = []
  flags.forEach((f, i) => { if (f && flags[i - 1] !== true) out.push([i, i + 1]); else if (f) out[out.length - 1][1] = i + 1 })
  return out
}
const capital = s => s.charAt(0).toUpperCase() + s.slice(1)
const elided = (s, n) => s.length <= n ? s : s.slice(0, Math.floor((n - 1) / 3)) + '…' + s.slice(s.length - (n - 1 - Math.floor((n - 1) / 3)))
function shortened(names, n) { // without what all of them begin with
  let parts = names.map(s => s.split('.'))
  while (longest(parts.map(p => p.join('.'))) > n && parts.length > 1 && parts.every(p => p.length > 1 && p[0] === parts[0][0])) parts = parts.map(p => p.slice(1))
  return parts.map(p => elided(p.join('.'), n))
}

// ---- lines

const mostLines = 200
async function drawLines() {
  const section = $('#lines'), list = kind() ? listed(kind()) : []
  section.hidden = !list.length
  if (section.hidden) return
  const v = await view(), { k, columns, value } = v, log = wide(value)
  const marked = list.filter(i => chosen(k.tensors[i])).slice(0, mostLines)
  const every = Math.ceil(list.length / mostLines), all = list.filter((i, n) => n % every === 0 && !marked.includes(i))
  const of = i => { const out = new Array(columns); for (let j = 0; j < columns; j++) out[j] = heightOf(value[i * columns + j], log); return out }
  const order = [...all, ...marked], colors = palette()
  const color = (i, n) => marked.length ? n < all.length ? css('--line') : colors[(n - all.length) % colors.length] :
    all.length <= 8 ? colors[n] : data.colors.scale[Math.round((isDark() ? .12 + .8 * n / all.length : .92 * n / all.length) * 63)]
  const odd = k.step.filter((_, j) => (marked.length ? marked : order).some(i => v.wrong(i, j)))
  const sparse = columns < 3, beside = marked.length <= 4 ? await besidesOf(marked.map(i => k.tensors[i].label)) : []
  const near = (u, left, top) => {
    const j = beside.length ? column(k.step, u.posToVal(left, 'x')) : u.posToIdx(left)
    let best = null, least = 40
    order.forEach((i, n) => {
      const y = heightOf(value[i * columns + j], log)
      if (y == null) return
      const far = Math.abs(u.valToPos(y, 'y') - top) - (n >= all.length ? 4 : 0)
      if (far < least) { least = far; best = i }
    })
    return [best, j]
  }
  const read = u => {
    const { left, top } = u.cursor, out = $('.readout', section)
    const [i, j] = left >= 0 && top >= 0 && !passedOn(u) ? near(u, left, top) : [null, 0], at = passedOn(u) ? column(k.step, u.posToVal(left, 'x')) : null
    out.replaceChildren()
    if (i != null) out.textContent = `${k.tensors[i].label}, ${stepsOf(k, j)}: ${few(value[i * columns + j])}`
    else if (!marked.length) out.textContent = `${count(order.length, 'tensor')}${order.length < k.tensors.length ? ` of ${whole(k.tensors.length)}` : ''}. Click a line, or choose a module.`
    else marked.slice(0, 8).forEach((i, n) => {
      const name = make('span', { textContent: `— ${k.tensors[i].label}${at == null ? '' : ' ' + (few(value[i * columns + at]) || 'NaN')}  ` })
      name.style.color = colors[n % colors.length]
      out.append(name)
    })
    if (i == null && marked.length > 8) out.append(`and ${whole(marked.length - 8)} more`)
    if (i == null) for (const o of beside) {
      const name = make('span', { textContent: `┄ ${o.label} of ${o.run}  ` })
      name.style.color = o.color
      out.append(name)
    }
  }
  chart('lines', { ...overSteps({
    click: (u, x, left, top) => { const [i] = near(u, left, top); choose(i == null ? { label: state.label, path: state.path, step: x } : { label: k.tensors[i].label, step: x }) },
    hooks: { setCursor: [read], draw: [u => crosses(u, odd, css('--bad'))] } }),
    series: [{}, ...order.map((i, n) => ({ stroke: color(i, n), width: n >= all.length ? 2 : all.length > 30 ? .7 : 1.2, points: { show: sparse, size: 5 } })),
      ...beside.map(o => ({ stroke: o.color, width: 2, dash: [6, 3], points: { show: o.step.length < 3, size: 5 } }))],
    axes: [xAxis, yAxis(log, labelRoom())] }, beside.length ? uPlot.join([[k.step, ...order.map(of)], ...beside.map(o => [o.step, o.y.map(v => heightOf(v, log))])]) : [k.step, ...order.map(of)], phone() ? 260 : 330)
  section.dataset.lines = order.length + beside.length
  $('h2', section).textContent = `${capital(k.name)}: ${v.name}${anything() ? ' of ' + (state.label ?? state.path) : ''}`
  attrs($('.chart', section), { 'aria-label': `Line chart of ${v.name} over the steps: ${marked.length ? marked.slice(0, 8).map(i => k.tensors[i].label).join(', ') : count(order.length, 'tensor')}. The table below has the numbers.` })
  read(charts.lines)
}

async function besidesOf(labels) { // the same tensors of other runs
  const out = [], colors = palette()
  for (const p of besides) {
    const o = p.kinds.find(o => o.ttype === state.kind)
    if (!o || !Object.hasOwn(o.stats, state.stat)) continue
    const value = await numbers(o.stats[state.stat]), n = o.step.length
    for (const label of labels) {
      const i = o.tensors.findIndex(t => t.label === label)
      if (i >= 0) out.push({ label, run: p.run.name, step: o.step, y: Array.from(value.subarray(i * n, (i + 1) * n)), color: colors[(labels.length + out.length) % colors.length] })
    }
  }
  return out
}

// ---- sizes of a tensor's numbers

async function drawSizes() {
  const section = $('#sizes'), k = kind(), e = k?.exponents, t = shown(k), out = $('.readout', section), box = $('.chart', section)
  section.hidden = !k || Boolean(k.heads)
  if (section.hidden) return
  const j = e ? column(e.step, here()) : 0
  const head = t ? `Sizes of the numbers in ${t.label}` : 'Sizes of numbers'
  $('h2', section).textContent = e ? `${head}, ${k.name}, step ${whole(e.step[j])}` : head
  let counts = null
  if (e && t) {
    const [, across, bins] = e.counts.shape, all = await numbers(e.counts), at = (k.tensors.indexOf(t) * across + j) * bins
    counts = all.slice(at, at + bins)
  }
  const total = counts?.reduce((a, b) => a + b, 0)
  const last = counts ? counts.length - 1 : 0, outer = total && counts[0] === total ? 0 : total && counts[last] === total ? last : null
  $('.format', section).hidden = !total || outer != null || !Object.keys(data.formats).length
  if (outer != null) { // one bar of 100 % says less than a sentence
    charts.sizes?.destroy()
    delete charts.sizes
    out.textContent = `All ${whole(total)} numbers are ${outer ? `${raised(e.first + last - 1)} or larger` : `smaller than ${raised(e.first)}, or zero`}: beyond what was counted one by one.`
    return attrs(box, { 'aria-label': out.textContent })
  }
  if (!total) {
    charts.sizes?.destroy()
    delete charts.sizes
    out.textContent = e ? 'Nothing was counted here.' : "This run has no exponent counts. To record them next time: torchEmber(model, stats='numerics')."
    return attrs(box, { 'aria-label': out.textContent })
  }
  let from = 1, to = counts.length - 2
  while (from < to && !counts[from]) from++
  while (to > from && !counts[to]) to--
  const low = e.first + from - 1, x = [], y = []
  if (counts[0]) { x.push(low - 2); y.push(counts[0] / total) }
  for (let i = from; i <= to; i++) { x.push(low + i - from); y.push(counts[i] / total) }
  const high = low + to - from
  if (counts[counts.length - 1]) { x.push(high + 2); y.push(counts[counts.length - 1] / total) }
  const format = data.formats[$('#format').value]
  const ends = [Math.min(low - 3, (format?.[0] ?? low) - 1), Math.max(high + 3, (format?.[2] ?? high) + 1)]
  const range = [Math.max(ends[0], low - 14), Math.min(ends[1], high + 14)]
  const band = u => {
    if (!format) return
    const { ctx, bbox } = u, at = v => Math.min(Math.max(u.valToPos(v - .5, 'x', true), bbox.left), bbox.left + bbox.width), h = 14 * devicePixelRatio
    ctx.save()
    ctx.fillStyle = palette()[1]
    for (const [a, b, alpha] of [[format[0], format[1], .3], [format[1], format[2] + 1, .85]]) { ctx.globalAlpha = alpha; ctx.fillRect(at(a), bbox.top, at(b) - at(a), h) }
    ctx.globalAlpha = .08; ctx.fillRect(at(format[0]), bbox.top, at(format[2] + 1) - at(format[0]), bbox.height)
    ctx.restore()
  }
  const label = v => counts[0] && v === low - 2 ? '0, less' : counts[counts.length - 1] && v === high + 2 ? 'more' : Number.isInteger(v) && v >= range[0] && v <= range[1] ? raised(v) : ''
  const tell = u => {
    const i = u.cursor.idx
    const outside = format ? x.reduce((sum, v, i) => sum + (v < format[0] && v !== low - 2 || v > format[2] ? y[i] : 0), 0) : null
    out.textContent = i == null || !(u.cursor.left >= 0) ? `${whole(total)} numbers${t.shape ? `, shape (${t.shape.join(', ')})` : ''}${t.dtype ? `, ${t.dtype}` : ''}` +
      (format ? `; ${percent(outside)} of them outside ${$('#format').value}` : '') : `${label(x[i])}${Number.isInteger(+x[i]) && x[i] >= low && x[i] <= high ? ' to ' + raised(x[i] + 1) : ''}: ${percent(y[i])}`
  }
  chart('sizes', { scales: { x: { time: false, range: () => range }, y: { range: (u, a, b) => [0, b * 1.18] } }, cursor: { drag: { x: false, y: false }, points: { show: false } },
    hooks: { drawClear: [band], setCursor: [tell] },
    series: [{}, { fill: palette()[0], stroke: palette()[0], width: 0, paths: uPlot.paths.bars({ size: [.9, Infinity] }), points: { show: false } }],
    axes: [{ size: 26, splits: () => { const every = [1, 2, 4, 8, 16, 32].find(k => (range[1] - range[0]) / k <= (phone() ? 6 : 14)) ?? 64, out = []
      for (let v = Math.ceil(range[0]); v <= range[1]; v++) if (v >= low - 1 && v <= high + 1 && v % every === 0 || v < low - 2 && v % every === 0 || v > high + 2 && v % every === 0 || counts[0] && v === low - 2 || counts[counts.length - 1] && v === high + 2) out.push(v)
      return out }, values: (u, ticks) => ticks.map(label) },
    { size: labelRoom(), values: (u, ticks) => ticks.map(v => percent(v)) }] }, [x, y], 230)
  tell(charts.sizes)
  attrs(box, { 'aria-label': `Histogram of sizes: ${out.textContent}. Most of them at ${label(x[y.indexOf(Math.max(...y))])}.` })
}

// ---- the table

const tableColumns = [['layer', r => r.label], ['steps', r => r.steps], ['first', r => r.first], ['last', r => r.last], ['lowest', r => r.low], ['highest', r => r.high], ['steps not finite', r => r.bad]]
const mostRows = 500
let lines = []
async function fillTable() {
  const section = $('#layers')
  section.hidden = !kind()
  if (section.hidden) return
  const { k, name, stat } = await view(), ends = await numbers(k.ends[stat])
  lines = k.tensors.map((t, i) => {
    const [first, last, low, high] = Array.from(ends.subarray(4 * i, 4 * i + 4), v => v === v ? v : undefined)
    return { label: t.label, path: t.path, why: t.why, steps: k.n[stat][i], bad: t.bad, first, last, low, high }
  })
  $('h2', section).textContent = `${capital(k.name)}: ${name}, layer by layer`
  $('thead tr', section).replaceChildren(...tableColumns.map(([title], c) => {
    const b = make('button', { type: 'button', textContent: title + (state.sort === c ? state.down ? ' ↓' : ' ↑' : '') })
    b.onclick = () => { state.down = state.sort === c ? !state.down : c > 0; state.sort = c; fillTable().then(() => $('#layers thead').querySelectorAll('button')[c].focus()) }
    return attrs(make('th', { scope: 'col' }, b), { 'aria-sort': state.sort === c ? state.down ? 'descending' : 'ascending' : null })
  }))
  fillRows()
}
function fillRows() {
  const get = state.sort == null ? null : tableColumns[state.sort][1]
  const some = lines.filter(r => found(textOf(r)))
  if (get) some.sort((a, b) => {
    const x = get(a) ?? -Infinity, y = get(b) ?? -Infinity
    return (x < y ? -1 : x > y ? 1 : 0) * (state.down ? -1 : 1)
  })
  $('#layers tbody').replaceChildren(...some.slice(0, mostRows).map(r => {
    const b = make('button', { type: 'button', textContent: r.label })
    const why = r.why ? [make('span', { className: 'why', textContent: ` ${r.why}` })] : []
    const row = make('tr', {}, attrs(make('th', {}, b, ...why), { scope: 'row' }), ...tableColumns.slice(1).map(([, f], c) => make('td', { textContent: c === 0 || c === 5 ? whole(f(r)) : few(f(r) ?? NaN) })))
    if (r.bad) row.lastChild.className = 'wrong'
    row.dataset.label = r.label
    row.onclick = () => choose(state.label === r.label ? {} : { label: r.label })
    return row
  }))
  $('#layers .readout').textContent = !some.length ? `No layer has “${state.words}” in its name.` : some.length > mostRows ? `The first ${mostRows} of ${whole(some.length)}: search to see others.` :
    state.words ? `${count(some.length, 'line')} of ${whole(lines.length)}` : ''
  markRows()
}
function markRows() {
  const yes = new Set(lines.filter(chosen).map(r => r.label))
  for (const row of $('#layers tbody').children) attrs(row, { 'aria-selected': anything() && yes.has(row.dataset.label) ? 'true' : null })
}

// ---- the tree

let modules = [], typeOf = new Map(), current = null
function plant(tree) {
  const open = new Map(modules.map(m => [m.path, m.open])), at = current?.path
  modules = tree.map(([path, name, type, depth], i) => ({ path, name, type, depth, i, leaf: !(tree[i + 1]?.[3] > depth), open: open.get(path) ?? true }))
  modules.forEach(m => { for (let i = m.i - 1; i >= 0; i--) if (modules[i].depth < m.depth) { m.above = modules[i]; break } })
  if (modules.length > 80 && !open.size) { // as deep as can be looked over
    const upTo = d => modules.filter(m => m.depth <= d).length
    let depth = 1
    while (upTo(depth + 1) <= 60) depth++
    for (const m of modules) m.open = m.depth < depth
  }
  typeOf = new Map(modules.map(m => [m.path, m.type]))
  current = modules.find(m => m.path === at) ?? modules[0]
  ofModule.clear()
}
function visible() {
  if (state.words) { // what is found, and what it lies in
    const keep = new Set()
    const paths = new Set((kind()?.tensors ?? []).filter(t => found(textOf(t))).map(t => t.path))
    for (const m of modules) if (paths.has(m.path) || found(m.path + ' ' + m.type)) for (let a = m; a; a = a.above) keep.add(a)
    return modules.filter(m => keep.has(m))
  }
  return modules.filter(m => { for (let a = m.above; a; a = a.above) if (!a.open) return false; return true })
}
const ofModule = new Map() // ttype -> path -> tensors
function tensorsOf(k, path) {
  if (!ofModule.has(k.ttype)) {
    const by = new Map()
    k.tensors.forEach((t, i) => { for (let p = t.path; ; p = p.slice(0, Math.max(p.lastIndexOf('.'), 0))) { by.has(p) || by.set(p, { own: [], bad: false }); if (p === t.path) by.get(p).own.push(i); by.get(p).bad ||= t.bad > 0; if (!p) break } })
    ofModule.set(k.ttype, by)
  }
  return ofModule.get(k.ttype).get(path)
}
function reveal() { // the chosen module, in the tree
  const m = state.path && modules.find(m => m.path === state.path)
  if (!m) return
  for (let a = m.above; a; a = a.above) a.open = true
  current = m
}
function scaleFor(v) {
  v.k.scales ??= new Map()
  if (!v.k.scales.has(v.stat)) v.k.scales.set(v.stat, scaleOf(v.value))
  return v.k.scales.get(v.stat)
}
const mostNodes = 1500
let patches = [] // [element, tensor] of the modules that are shown
async function colorTree() {
  const v = kind() ? await view() : null, scale = v && scaleFor(v), j = v && column(v.k.step, here())
  for (const [patch, i] of v ? patches : []) {
    const c = colorOf(scale, v.value[i * v.columns + j])
    patch.style.background = v.wrong(i, j) ? css('--bad') : c ? `rgb(${c})` : 'transparent'
  }
}
async function drawTree(focus = false) {
  const v = kind() ? await view() : null, seen = visible()
  patches = []
  if (!seen.includes(current)) current = seen[0]
  $('#tree').replaceChildren(...seen.slice(0, mostNodes).map(m => {
    const t = v && tensorsOf(v.k, m.path), patch = make('span', { className: 'patch' }), i = t?.own[0]
    if (i != null) patches.push([patch, i])
    else patch.style.visibility = 'hidden'
    const open = m.open || state.words !== ''
    const node = make('div', { tabIndex: m === current ? 0 : -1, title: m.path + (m.type ? ` (${m.type})` : '') },
      make('span', { className: 'fold', textContent: m.leaf ? '' : open ? '▾' : '▸' }), patch, make('span', { textContent: m.name }), make('span', { className: 'class', textContent: m.type }))
    if (t?.bad) node.append(attrs(make('span', { className: 'wrong', textContent: '×' }), { title: 'not finite at some step', 'aria-label': 'not finite at some step' }))
    node.style.paddingLeft = `${.2 + m.depth * .75}rem`
    attrs(node, { role: 'treeitem', 'aria-level': m.depth + 1, 'aria-expanded': m.leaf ? null : String(open), 'aria-selected': String(state.path === m.path && m.path !== '') })
    node.onclick = e => {
      current = m
      if (!m.leaf && e.target.classList.contains('fold')) { m.open = !m.open; drawTree(true) } else pickModule(m)
    }
    if (m === current) queueMicrotask(() => { if (focus && node.isConnected) node.focus() })
    return node
  }))
  await colorTree()
  const it = $('#tree [aria-selected=true]'), nav = $('#side').open && it?.closest(phone() ? '#tree' : 'nav')
  if (nav && (it.offsetTop < nav.scrollTop || it.offsetTop + it.offsetHeight > nav.scrollTop + nav.clientHeight)) nav.scrollTop = it.offsetTop - nav.clientHeight / 2
  if (seen.length > mostNodes) $('#tree').append(make('div', { textContent: `and ${whole(seen.length - mostNodes)} more: search` }))
  if (!seen.length) $('#tree').append(make('div', { textContent: 'No module is called so.' }))
}
const pickModule = m => choose(!m.path || state.path === m.path && state.label == null ? {} : { path: m.path })
$('#tree').addEventListener('keydown', e => {
  const seen = visible(), at = seen.indexOf(current), to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: seen.length - 1 }[e.key]
  if (to != null) current = seen[Math.min(Math.max(to, 0), seen.length - 1)]
  else if (e.key === 'ArrowRight') { if (!current.leaf && !current.open) current.open = true; else if (!current.leaf) current = seen[at + 1] ?? current }
  else if (e.key === 'ArrowLeft') { if (!current.leaf && current.open) current.open = false; else current = current.above ?? current }
  else if (e.key === 'Enter' || e.key === ' ') pickModule(current)
  else return
  e.preventDefault()
  drawTree(true)
})

// ---- what rules of health saw: all of its words are data

const fewFindings = 3
function tensorOf(f) { // which of the tensors that are drawn a finding is of; one of the whole model is of none
  const of = kind()?.tensors.filter(t => t.path === (f.path ?? '')) ?? []
  return f.pname ? of.find(t => t.label === (f.path ? f.path + '.' : '') + f.pname) : f.path && of.length === 1 ? of[0] : undefined
}
function goTo(f) { // to its layer and step, as clicks on these do
  const known = kinds.has(f.ttype)
  if (known) { state.kind = f.ttype; if (!Object.hasOwn(kind().stats, state.stat)) state.stat = Object.keys(kind().stats)[0]; fillControls() }
  const t = known ? tensorOf(f) : undefined
  state.label = t?.label ?? null
  state.path = (t?.path ?? f.path) || null
  state.step = nearest(steps(), f.first)
  if (state.words) { state.words = ''; $('#search').value = '' }
  if (zoom && (state.step < zoom.min || state.step > zoom.max)) zoomTo(null)
  reveal()
  return changed('all').then(() => { const seen = $(f.ttype === 'scalar' || !kind() ? '#numbers' : '#heat'); if (!seen.hidden) seen.scrollIntoView({ block: 'nearest' }) })
}
function withCode(text) { // what stands in backticks is a name
  const parts = text.split('`')
  return parts.map((s, i) => i % 2 && i < parts.length - 1 ? make('code', { textContent: s }) : i % 2 ? '`' + s : s)
}
function findingButton(f) {
  const b = make('button', { type: 'button' }, make('b', { textContent: f.severity }), ' ', ...withCode(f.text ?? f.rule))
  b.onclick = () => goTo(f)
  b.title = [f.rule, f.path, f.last > f.first ? `steps ${whole(f.first)} to ${whole(f.last)}` : `step ${whole(f.first)}`].filter(Boolean).join(', ')
  return b
}
const fold = (title, ...inside) => make('details', {}, make('summary', { textContent: title }), ...inside)
const itemOf = f => make('li', { className: tones.has(f.severity) ? f.severity : 'info' }, findingButton(f),
  ...(f.advice || f.look ? [make('p', {}, ...(f.advice ? ['Try: ', ...withCode(f.advice)] : []), ...(f.look ? [' ', make('span', { className: 'look' }, 'Look at: ', make('code', { textContent: f.look }))] : []))] : []),
  ...(f.below?.length ? [fold(`${count(f.below.length + (f.more ?? 0), 'more finding')} follow${f.below.length + (f.more ?? 0) === 1 ? 's' : ''} from it`, listOf(f.below),
    ...(f.more ? [make('p', { textContent: `and ${whole(f.more)} more: diagnose(run) has all.` })] : []))] : []))
const listOf = some => make('ul', {}, ...some.map(itemOf))
const tones = new Set(['error', 'warning', 'info'])
let saidOfHealth = null
function fillHealth() {
  const h = data.health, section = $('#health'), now = JSON.stringify(h ?? null)
  if (saidOfHealth === now) return // what was opened stays open
  saidOfHealth = now
  section.replaceChildren()
  section.hidden = !h
  if (section.hidden) return
  const wrong = h.findings.filter(f => f.severity !== 'info'), notes = h.findings.filter(f => f.severity === 'info')
  const number = word => wrong.filter(f => f.severity === word).length, heads = ['error', 'warning'].filter(number).map(w => count(number(w), w))
  if (wrong.length) section.append(make('h2', { textContent: `What is wrong: ${heads.join(', ')}` }), listOf(wrong.slice(0, fewFindings)))
  if (wrong.length > fewFindings) section.append(fold(`and ${whole(wrong.length - fewFindings)} more`, listOf(wrong.slice(fewFindings))))
  if (notes.length) section.append(fold(count(notes.length, 'note'), listOf(notes)))
  if (h.more) section.append(make('p', { textContent: `${whole(h.more)} more: diagnose(run) has all.` }))
  const unseen = h.unseen?.length ? ` Not checked: ${h.unseen.map(([what, how]) => `${what} (to record: ${how})`).join('; ')}.` : ''
  if (h.looked) section.append(make('p', { textContent: `${wrong.length ? '' : 'No problem found. '}${h.looked}.${wrong.length ? '' : unseen}` }))
  section.append(...h.failed.map(s => make('p', { textContent: s })))
}

// ---- all together

let drawing = Promise.resolve(), help = '', searches = 0
function changed(what) {
  drawing = drawing.then(() => redraw(what)).then(() => { $('#small').textContent = help }, e => { $('#small').textContent = `This page has a fault: ${e.message}`; console.error(e) })
  return drawing
}
async function redraw(what) {
  toAddress()
  const slider = $('#step'), all = steps()
  slider.max = Math.max(all.length - 1, 0)
  slider.value = column(all, state.step)
  slider.disabled = all.length < 2
  $('#stepout').textContent = all.length ? whole(state.step) : '–'
  attrs(slider, { 'aria-valuetext': `step ${state.step}` })
  $('#clear').hidden = !anything()
  if (what === 'step' || what === 'choice') { charts.numbers?.redraw(false); charts.heat?.redraw(false) }
  if (what === 'step') charts.lines?.redraw(false)
  const tree = drawTree(what !== 'step' && $('#tree').contains(document.activeElement))
  if (what === 'search') { if (--searches) return; await drawHeat() } // of quick fingers, the last
  if (what === 'all' || what === 'kind') { await drawNumbers(); await drawHeat() }
  if (what !== 'step') await drawLines()
  await drawSizes()
  await drawHeads()
  if (what === 'all' || what === 'kind') await fillTable(); else markRows()
  if (what !== 'kind' && what !== 'all' && kind() && charts.heat) charts.heat.setCursor({ left: -10, top: -10 })
  await tree
}
const moveStep = n => { const all = steps(); state.step = all[Math.min(Math.max(column(all, state.step) + n, 0), all.length - 1)] ?? 0; changed('step') }

function fillOptions(select, names, title, value) {
  const now = JSON.stringify(names.map(n => [n, title(n)]))
  if (select.names !== now) select.replaceChildren(...names.map(n => make('option', { value: n, textContent: title(n) }))) // one that is open stays so
  select.names = now
  if (value != null) select.value = value
  select.disabled = names.length < 2
}
function fillControls() {
  fillOptions($('#kind'), [...kinds.keys()], n => kinds.get(n).name, state.kind)
  fillOptions($('#stat'), kind() ? Object.keys(kind().stats) : [], n => data.meanings[n] ?? n, state.stat)
}

let goingOn = 'still going on when this was made'
const facts = r => [r.model, `${count(r.steps, 'step')}, ${whole(r.first)} to ${whole(r.last)}`, r.start && `begun ${r.start}`,
  r.running ? goingOn : r.end && `ended ${r.end}`, r.rows && `${count(r.rows, 'row')}`,
  r.seconds != null && `recording took ${r.seconds < 10 ? r.seconds.toPrecision(2) : whole(r.seconds)} s${r.share > 0 && r.share < 1 ? `, ${percent(r.share)} of the training` : ''}`].filter(Boolean).join(' · ')

function show(page) { // a run, or a newer state of it
  data = page
  const r = data.run
  kinds = new Map(data.kinds.map(k => [k.ttype, k]))
  ramp = data.colors.scale.map(bytesOf)
  gray = bytesOf(data.colors.zero)
  plant(data.tree)
  $('#name').textContent = r.name
  $('#facts').textContent = facts(r)
  const trouble = $('#trouble')
  trouble.hidden = false
  trouble.replaceChildren()
  trouble.removeAttribute('style')
  if (data.trouble) {
    const b = make('button', { type: 'button', textContent: capital(data.trouble.text) })
    b.onclick = () => goTo({ ...data.trouble, first: data.trouble.step })
    trouble.append(b)
  } else {
    const odd = data.numbers.find(n => n.odd != null)
    trouble.textContent = odd ? `${data.kinds.length ? 'All tensors were finite, but not ' : 'Not finite: '}${odd.name}: first at step ${whole(odd.odd)}.` : data.kinds.length ? 'All tensors that were recorded are finite.' : ''
    if (!odd) { trouble.style.color = 'inherit'; trouble.style.fontWeight = 'normal' }
  }
  fillHealth()
  $('#missing').hidden = !r.missing
  $('#missing').textContent = r.missing ?? ''
  fromAddress()
  reveal()
  fillControls()
  which = Math.max(data.numbers.findIndex(n => n.name === whichName), 0)
  fillOptions($('#number'), data.numbers.map((_, i) => String(i)), i => data.numbers[i].name, String(which))
  const format = $('#format').value
  fillOptions($('#format'), Object.keys(data.formats), n => n, Object.hasOwn(data.formats, format) ? format : null)
  const thin = data.kinds.find(k => k.thin)
  help = 'Drag over a chart to zoom in, double-click to zoom out. The address of the page remembers what is chosen.' +
    (thin ? ` Of neighbouring steps, heat maps and lines show the one that is farthest from the usual: ${whole(thin.step.length)} columns for all steps. The table has all of them.` : '') + source(r)
  return changed('all')
}
let source = r => ` Made by torchember${r.version ? ' ' + r.version : ''}; all of it is in this file.`

function listen() { // to whoever looks
  const dark = matchMedia('(prefers-color-scheme: dark)')
  document.documentElement.dataset.theme = dark.matches ? 'dark' : 'light'
  dark.addEventListener('change', e => { document.documentElement.dataset.theme = e.matches ? 'dark' : 'light'; if (data) changed('all') })
  $('#theme').onclick = () => { document.documentElement.dataset.theme = isDark() ? 'light' : 'dark'; if (data) changed('all') }
  $('#number').onchange = e => { which = +e.target.value; whichName = data.numbers[which].name; changed('all') }
  $('#format').onchange = () => changed('step')
  $('#kind').onchange = e => {
    state.kind = e.target.value
    if (!Object.hasOwn(kind().stats, state.stat)) state.stat = Object.keys(kind().stats)[0]
    if (state.label != null && !kind().tensors.some(t => t.label === state.label)) state.label = null
    state.step = nearest(steps(), state.step)
    fillControls()
    changed('kind')
  }
  $('#stat').onchange = e => { state.stat = e.target.value; changed('kind') }
  $('#step').oninput = e => { state.step = steps()[+e.target.value] ?? 0; changed('step') }
  const search = words => { state.words = words.trim(); fillRows(); drawTree(); searches++; changed('search') }
  $('#search').oninput = e => search(e.target.value)
  $('#clear').onclick = () => choose({})
  document.addEventListener('keydown', e => {
    if (e.key === '/' && !/INPUT|SELECT|TEXTAREA/.test(document.activeElement.tagName)) { e.preventDefault(); $('#search').focus() }
    if (e.key === 'Escape') { if (state.words) { $('#search').value = ''; search('') } else if (anything()) choose({}) }
  })
  $('#heat .chart').addEventListener('keydown', e => {
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[e.key]
    if (!move) return
    e.preventDefault()
    if (move[1]) return moveStep(move[1])
    const all = listed(kind()).map(i => kind().tensors[i]), i = all.indexOf(shown()) + (anything() ? move[0] : 0)
    choose({ label: all[Math.min(Math.max(i, 0), all.length - 1)].label })
  })
  $('.skip').onclick = e => { e.preventDefault(); $('#main').focus() }
  addEventListener('hashchange', () => { if (!data || !location.hash.includes('tensors=') || !addressIsOurs()) return; fromAddress(); fillControls(); changed('all') })
  if (phone()) $('#side').open = false
  let width = innerWidth
  new ResizeObserver(() => {
    if ((width < 760) !== phone()) { width = innerWidth; $('#side').open = !phone(); changed('all'); return }
    for (const [id, u] of Object.entries(charts)) { const w = $(`#${id} .chart`).clientWidth; if (w && Math.abs(w - u.width) > 1) u.setSize({ width: w, height: u.tall }) }
  }).observe($('#main'))
}
const ready = () => { document.documentElement.dataset.ready = Math.round(performance.now()) }
listen()
if ($('#data')) show(JSON.parse($('#data').textContent)).then(ready)
