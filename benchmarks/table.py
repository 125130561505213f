"Tables of benchmark results: for the terminal, as Markdown and as JSON."
import json

columns = ('row', 'measurement', 'measured', '95% interval', 'quartiles', 'n', 'limit', 'verdict')


def number(v, unit):
    "Return a value as text, with three digits and its unit."
    if v is None: return 'not measured'
    if unit=='us': unit = 'µs'
    if unit=='%': return f'{v:+.2f}%' if abs(v)<10 else f'{v:+.0f}%'
    text = f'{v:.0f}' if unit=='' or abs(v)>=100 else f'{v:.3g}'
    return f'{text}x' if unit=='x' else f'{text} {unit}'.strip()


def between(ends, unit): return f'{number(ends[0], unit)} to {number(ends[1], unit)}' if ends else ''


def verdict(l): return '' if l['verdict'] is None else l['verdict'] if l['sure'] else f"{l['verdict']}, within noise"


def limit(l):
    "Return the limits of a line of the table as text."
    most,least,unit = l['at_most'],l['at_least'],l['unit']
    if most is not None and least is not None: return between([least, most], unit)
    return f'<= {number(most, unit)}' if most is not None else f'>= {number(least, unit)}' if least is not None else ''


def cells(row):
    "Return the texts of the cells for each line of a row."
    if 'error' in row: return [[row['row'], row['title'], f"failed: {row['error']}", *['']*5]]
    if 'skipped' in row: return [[row['row'], row['title'], f"skipped: {row['skipped']}", *['']*5]]
    return [[row['row'] if not i else '', l['what'], number(l['value'], l['unit']), between(l['interval'], l['unit']),
        between(l['quartiles'], l['unit']), str(l['n']), limit(l), verdict(l)] for i,l in enumerate(row['lines'])]


def columns_text(table):
    "Return rows of cells as text with aligned columns."
    widths = [max(map(len, c)) for c in zip(*table, strict=True)]
    return '\n'.join('  '.join(c.ljust(w) for c,w in zip(r, widths, strict=True)).rstrip() for r in table)


def origin(result): return f"{result['date']}, " + ', '.join(f'{k} {v}' if k!='cpu' else v for k,v in result['versions'].items())


def text(result):
    "Return the table of results as text for a terminal."
    return columns_text([columns, *(c for r in result['rows'] for c in cells(r))]) + f"\n\n{origin(result)}"


def markdown(result):
    "Return the table of results as Markdown, with explanations below."
    lines = [columns, ['---']*len(columns), *(c for r in result['rows'] for c in cells(r))]
    notes = [f"- {l['what']}: {l['note']}" for r in result['rows'] for l in r['lines'] if l['note']]
    return '\n'.join(['# What torchember costs', '', '<!-- Written by `make bench` -->', '', origin(result)+'.', '',
        *('| '+' | '.join(r)+' |' for r in lines), '', *notes])+'\n'


def save(result, folder, name):
    "Save the results as a JSON file and as a Markdown file."
    folder.mkdir(exist_ok=True)
    kept = result | {'rows': [{k:v for k,v in r.items() if k!='trace'} for r in result['rows']]}
    (folder/f'{name}.json').write_text(json.dumps(kept, indent=1)+'\n')
    (folder/f'{name}.md').write_text(markdown(result), encoding='utf-8')
