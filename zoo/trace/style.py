"""The look of a trace's page, and the little that it does."""

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #fbfaf7; --card: #fff; --ink: #1d2430; --soft: #5d6676; --line: #e3e0d8; --accent: #0e8a86;
  --accent-rgb: 14 138 134; --tint: #eef6f5;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #12161c; --card: #191f27; --ink: #e6e9ee; --soft: #98a2b3; --line: #2c3440; --accent: #4cc2bd;
    --accent-rgb: 76 194 189; --tint: #17292b;
  }
  .grid img, .thumb { filter: brightness(1.35); }
}
* { box-sizing: border-box; }
html { scroll-padding-top: 7.5rem; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 74rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 2rem; line-height: 1.2; margin: 0 0 .5rem; letter-spacing: -.01em; }
h2 { font-size: 1.35rem; margin: 0 0 .5rem; }
h2 small { color: var(--soft); font-weight: 400; }
h3 { font-size: 1.05rem; margin: 1.75rem 0 .25rem; }
.kicker { margin: 0; color: var(--accent); font: 600 .8rem ui-monospace, monospace; letter-spacing: .08em; }
.lead { max-width: 46rem; color: var(--soft); margin: 0 0 1rem; }
.hint { max-width: 46rem; color: var(--soft); margin: 0 0 .75rem; font-size: .92rem; }
.letters { display: grid; grid-template-columns: repeat(auto-fill, minmax(14rem, 1fr)); gap: .35rem 1.5rem; }
.letters div { display: flex; gap: .6rem; align-items: baseline; }
.letters dt { font: 600 .88rem ui-monospace, monospace; white-space: nowrap; min-width: 4.5rem; }
.letters dd { margin: 0; color: var(--soft); font-size: .88rem; }
nav {
  position: sticky; top: 0; z-index: 2; background: var(--paper); padding: .6rem 0 .5rem;
  border-bottom: 1px solid var(--line); margin-bottom: 1.5rem;
}
.chips { display: flex; flex-wrap: wrap; gap: 3px; max-height: 6.2rem; overflow-y: auto; }
.chip {
  font: .9rem/1 ui-monospace, monospace; padding: .38rem .42rem; min-width: 1.5rem; cursor: pointer;
  color: inherit; background: var(--card); border: 1px solid var(--line); border-radius: 5px;
}
.chip[aria-pressed=true] { background: var(--accent); border-color: var(--accent); color: var(--paper); }
.jump { display: flex; flex-wrap: wrap; gap: .15rem 1rem; margin-top: .45rem; font-size: .85rem; }
a { color: var(--accent); text-underline-offset: 3px; }
:focus-visible { outline: 3px solid var(--accent); outline-offset: 2px; }
section {
  background: var(--card); border: 1px solid var(--line); border-radius: 12px;
  padding: 1.4rem 1.5rem 1.6rem; margin-bottom: 1.5rem;
}
.formula { font-family: Cambria, "STIX Two Text", Georgia, "DejaVu Serif", serif; }
p.formula { font-size: 1.1rem; margin: 0 0 .9rem; }
sub, sup { font-size: .72em; line-height: 0; }
summary { cursor: pointer; color: var(--accent); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; }
.steps { width: 100%; min-width: 46rem; margin-top: .5rem; }
.steps th, .steps td {
  text-align: left; vertical-align: top; padding: .6rem 1rem .6rem 0; border-top: 1px solid var(--line);
}
.steps tr:first-child th { border: 0; color: var(--soft); font-weight: 500; font-size: .82rem; padding-bottom: .2rem; }
.steps th[scope=row] { width: 21%; padding-left: .8rem; }
.steps td:nth-child(2) { width: 24%; }
.steps td:nth-child(3) { font-size: .92rem; }
.steps td:nth-child(4) { width: 12.5rem; padding-right: 0; }
.steps small { color: var(--soft); font-weight: 400; }
.stream th[scope=row] { box-shadow: inset 4px 0 var(--accent); }
.stream { background: linear-gradient(90deg, var(--tint), transparent 60%); }
.shape { display: block; font: 500 .82rem ui-monospace, monospace; color: var(--accent); margin-top: .15rem; }
.thumb, .grid img { image-rendering: pixelated; display: block; }
.thumb {
  width: 12rem; height: clamp(2rem, calc(var(--n) * 3px), 7rem); border: 1px solid var(--line); border-radius: 4px;
}
.numbers { font: .85rem ui-monospace, monospace; color: var(--soft); }
.heads { display: grid; grid-template-columns: repeat(auto-fill, minmax(11.5rem, 1fr)); gap: 1.25rem; }
figure { margin: 0; min-width: 0; }
figcaption { font-weight: 600; font-size: .9rem; margin-bottom: .25rem; }
.grid { position: relative; border: 1px solid var(--line); border-radius: 4px; overflow: hidden; }
.grid img { width: 100%; aspect-ratio: 1; }
.grid i {
  position: absolute; left: 0; right: 0; height: calc(100% / var(--n)); top: calc(var(--at) * 100% / var(--n));
  outline: 2px solid var(--ink); outline-offset: -1px; opacity: .55; pointer-events: none;
}
.line { margin: .45rem 0 0; font: .82rem/1.75 ui-monospace, monospace; word-break: break-all; }
.line span { background: rgb(var(--accent-rgb) / calc(var(--w) * .85)); border-radius: 2px; padding: .1em .06em; }
.experts { font: .72rem ui-monospace, monospace; }
.experts th, .experts td { padding: 0; text-align: center; min-width: 1.75rem; height: 1.75rem; }
.experts th[scope=row] {
  text-align: right; padding-right: .6rem; font-weight: 500; white-space: nowrap;
  position: sticky; left: 0; background: var(--card);
}
.experts th[scope=col] { font-size: .85rem; vertical-align: bottom; padding: 0 .2rem; }
.experts td { border: 1px solid var(--line); color: var(--soft); }
.experts tr:first-child td { border: 0; }
.experts .on { background: hsl(var(--hue) 62% 52% / calc(var(--w) * .9)); color: var(--ink); }
.experts [aria-current=true] { color: var(--paper); background: var(--accent); border-radius: 4px; }
.guesses { width: 100%; max-width: 46rem; }
.guesses th, .guesses td { text-align: left; padding: .2rem .8rem .2rem 0; font-weight: 400; }
.guesses th[scope=col] { color: var(--soft); font-size: .82rem; }
.guesses th[scope=row], .guesses td { font: .9rem ui-monospace, monospace; }
.guesses td:last-child { width: 70%; position: relative; }
.guesses td:last-child span:last-child { position: relative; padding-left: .5rem; }
.bar { position: absolute; inset: .15rem auto .15rem 0; background: rgb(var(--accent-rgb) / .35); border-radius: 3px; }
@media (max-width: 40rem) { section { padding: 1rem; } h1 { font-size: 1.5rem; } }
"""

# Shows the text as the chosen token sees it, head by head; the weights are read off the pictures' opacity.
SCRIPT = """
const chips = [...document.querySelectorAll('.chip')], n = chips.length;
function row(img, i) {
  const canvas = Object.assign(document.createElement('canvas'), {width: n, height: n});
  const context = canvas.getContext('2d');
  context.drawImage(img, 0, 0);
  return Array.from(context.getImageData(0, i, n, 1).data.filter((_, j) => j % 4 === 3), a => a / 255);
}
function pick(i) {
  document.documentElement.style.setProperty('--at', i);
  chips.forEach((chip, j) => chip.setAttribute('aria-pressed', j === i));
  for (const line of document.querySelectorAll('.line')) {
    const weights = row(line.parentElement.querySelector('img'), i);
    weights.push(Math.sqrt(Math.max(0, 1 - weights.reduce((sum, w) => sum + w * w, 0))));  // the sink's
    [...line.children].forEach((piece, j) => {
      piece.style.setProperty('--w', weights[j]);
      piece.title = Math.round(100 * weights[j] ** 2) + '%';
    });
  }
  for (const head of document.querySelectorAll('[data-at]'))
    head.setAttribute('aria-current', Number(head.dataset.at) === i);
}
chips.forEach((chip, i) => chip.addEventListener('click', () => pick(i)));
"""
